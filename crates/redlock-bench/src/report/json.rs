//! The files for machines.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Where a report is written, if anywhere. Created before anything is measured: a run must not end with a path that cannot
/// be written.
pub(crate) struct JsonFile(Option<(PathBuf, File)>);

impl JsonFile {
    pub(crate) fn create(path: Option<&Path>) -> Result<Self, String> {
        let create = |path: &Path| Ok((path.to_owned(), File::create(path).map_err(|error| fault(path, &error))?));
        path.map(create).transpose().map(Self)
    }

    pub(crate) fn write(self, report: &impl Serialize) -> Result<(), String> {
        let Some((path, file)) = self.0 else { return Ok(()) };
        let mut writer = BufWriter::new(file);
        serde_json::to_writer_pretty(&mut writer, report)
            .map_err(io::Error::from)
            .and_then(|()| writer.write_all(b"\n"))
            .and_then(|()| writer.flush())
            .map_err(|error| fault(&path, &error))
    }
}

fn fault(path: &Path, error: &io::Error) -> String {
    format!("--json {}: {error}", path.display())
}
