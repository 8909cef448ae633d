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
        let first = keys(path, watched.contents())?;
        if first.is_empty() {
            tracing::warn!(file = %path.display(), "--auth-keys: there is no key in the file: nobody is let in");
        }
        let guard = Arc::new(Self::new(first));
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
    let content = contents.first().ok_or_else(|| format!("{}: it was not read", path.display()))?;
    // As a file looks that is about to be written. To let nobody in, leave a comment in it.
    if content.as_ref().is_ok_and(|bytes| bytes.trim_ascii().is_empty()) {
        return Err(format!("{}: it is empty", path.display()));
    }
    Keys::of_file(path, content)
}
