"""The package as a user gets it: its description, and a consumer in an empty folder."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import unittest

from servers import PATIENCE, Servers

PROGRAM = """
import sys
from redlock_gateway import Client

with Client(sys.argv[1]) as client, client.lock("jobs/consumer", ttl=60) as guard:
    print(client.status("jobs/consumer").fencing_token == guard.fencing_token, guard.name)
"""


class Package(unittest.TestCase):
    def test_description_names_licence_authors_and_addresses(self) -> None:
        package = importlib.metadata.metadata("redlock-gateway")
        self.assertEqual("MIT OR Apache-2.0", package["License-Expression"])
        self.assertEqual("the redlock-gateway authors", package["Author"])
        files = importlib.metadata.files("redlock-gateway") or []
        for name in ["LICENSE-MIT", "LICENSE-APACHE"]:
            self.assertIn(name, package.get_all("License-File") or [])
            self.assertTrue(any(file.name == name and len(file.read_text()) > 1000 for file in files), name)
        addresses = package.get_all("Project-URL") or []
        self.assertTrue(all("https://github.com/redlock-gateway/redlock-gateway" in each for each in addresses))
        self.assertGreater(len(addresses), 2)
        self.assertIn("Typing :: Typed", package.get_all("Classifier") or [])

    def test_consumer_in_an_empty_folder_takes_a_lock(self) -> None:
        servers = Servers()
        self.addCleanup(servers.close)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", PROGRAM, servers.urls[0]]
            user = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
            )
        self.assertEqual(("True jobs/consumer\n", ""), (user.stdout, user.stderr))


if __name__ == "__main__":
    unittest.main()
