"""Tags the wheel: for any Python 3, on this machine's processor."""

import sysconfig

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Tag(BuildHookInterface):
    def initialize(self, version, build_data):
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_")
