//! The files for machines.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Created before anything is measured: a run must not end with a path that cannot be written.
pub(crate) struct JsonFile {
    path: PathBuf,
    file: File,
}

impl JsonFile {
    pub(crate) fn create(path: &Path) -> Result<Self, String> {
        let file = File::create(path).map_err(|error| format!("--json {}: {error}", path.display()))?;
        Ok(Self { path: path.to_owned(), file })
    }

    pub(crate) fn write(self, report: &impl Serialize) -> Result<(), String> {
        let mut writer = BufWriter::new(self.file);
        serde_json::to_writer_pretty(&mut writer, report)
            .map_err(std::io::Error::from)
            .and_then(|()| writer.write_all(b"\n"))
            .and_then(|()| writer.flush())
            .map_err(|error| format!("--json {}: {error}", self.path.display()))
    }
}
