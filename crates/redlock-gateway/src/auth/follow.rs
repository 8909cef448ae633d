//! The keys as they stand in their file, now and later.

use std::path::Path;
use std::sync::Arc;

use super::{Guard, Keys};
use crate::reload::{Content, Reload, Watched};

impl Guard {
    /// The keys of a file. When the file changes, the new ones count from then on; a file that cannot be used changes
    /// nothing, and the log says so. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// What is wrong with the file now.
    pub(crate) fn following(path: &Path, reload: &Reload) -> Result<Arc<Self>, String> {
        let mut watched = Watched::new(vec![path.to_owned()], reload);
        let guard = Arc::new(Self::new(keys(path, watched.contents())?));
        let (path, followed) = (path.to_owned(), guard.clone());
        tokio::spawn(async move {
            loop {
                watched.changed().await;
                match keys(&path, watched.contents()) {
                    Ok(keys) => {
                        tracing::info!(keys = keys.len(), "--auth-keys: the file was read again");
                        followed.replace(keys);
                    }
                    Err(error) => tracing::error!(error, "--auth-keys: the file cannot be used; the old keys stay"),
                }
            }
        });
        Ok(guard)
    }
}

fn keys(path: &Path, contents: &[Content]) -> Result<Keys, String> {
    let shown = path.display();
    let bytes = match contents {
        [Ok(bytes)] => bytes,
        [Err(error), ..] => return Err(format!("{shown}: {error}")),
        _ => return Err(format!("{shown}: it was not read")),
    };
    let text = std::str::from_utf8(bytes).map_err(|_| format!("{shown}: it is not UTF-8"))?;
    Keys::parse(text).map_err(|error| format!("{shown}{error}"))
}
