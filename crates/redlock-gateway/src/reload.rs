//! When files have to be read again: their contents have changed, or an operator says so.
//!
//! Contents are compared, once a second. A notification of the file system would miss a file on another machine, and the
//! links that Kubernetes turns round when a secret changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// How often files are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How long contents must stay as they are before they count: several files are replaced one after the other.
const SETTLE: Duration = Duration::from_millis(200);
/// In bytes: thousands of keys or certificates.
const LARGEST: u64 = 4 << 20;
/// A file that never stays as it is must not hide the others for ever.
const MAX_LOOKS: u32 = 10;

/// An operator's order to read all files again, seen by every [`Watched`].
#[derive(Debug, Clone)]
pub struct Reload(Arc<watch::Sender<()>>);

impl Default for Reload {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(())))
    }
}

impl Reload {
    /// Has every file read again, changed or not.
    pub fn trigger(&self) {
        self.0.send_replace(());
    }
}

/// What stands in a file, or why it cannot be read.
pub(crate) type Content = Result<Vec<u8>, String>;

/// Files whose contents are in use.
pub(crate) struct Watched {
    paths: Arc<[PathBuf]>,
    contents: Vec<Content>,
    asked: watch::Receiver<()>,
    /// Keeps the above open.
    _reload: Reload,
}

impl Watched {
    /// Reads the files.
    pub(crate) fn new(paths: Vec<PathBuf>, reload: &Reload) -> Self {
        let contents = read(&paths);
        Self { paths: paths.into(), contents, asked: reload.0.subscribe(), _reload: reload.clone() }
    }

    /// As they were read last, in the order of the paths: a change after that is seen by [`Self::changed`].
    pub(crate) fn contents(&self) -> &[Content] {
        &self.contents
    }

    /// Resolves when there are other contents than those read last, or a reload was ordered; dropped before, it may lose the
    /// latter.
    pub(crate) async fn changed(&mut self) {
        loop {
            let asked = tokio::time::timeout(LOOK, self.asked.changed()).await.is_ok();
            let mut now = self.look().await;
            if !asked && now == self.contents {
                continue;
            }
            for _ in 0..MAX_LOOKS {
                tokio::time::sleep(SETTLE).await;
                let before = std::mem::replace(&mut now, self.look().await);
                if now == before {
                    break;
                }
            }
            // The change may have been taken back.
            if asked || now != self.contents {
                self.contents = now;
                return;
            }
        }
    }

    /// Files may lie where reading takes its time: not on a thread that serves.
    async fn look(&self) -> Vec<Content> {
        let paths = self.paths.clone();
        tokio::task::spawn_blocking(move || read(&paths))
            .await
            .unwrap_or_else(|_| self.contents.clone())
    }
}

/// What stands in these files now.
pub(crate) fn read(paths: &[PathBuf]) -> Vec<Content> {
    paths.iter().map(|path| read_one(path)).collect()
}

/// Settings are small, and reading what is no file may take for ever.
pub(crate) fn read_one(path: &Path) -> Content {
    let said = |error: std::io::Error| error.to_string();
    let found = std::fs::metadata(path).map_err(said)?;
    if !found.is_file() {
        return Err("it is not a regular file".into());
    }
    if found.len() > LARGEST {
        return Err(format!("it has {} bytes; allowed are {LARGEST}", found.len()));
    }
    std::fs::read(path).map_err(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Files(Vec<PathBuf>);

    impl Files {
        fn new(name: &str) -> Self {
            let path = |n| {
                std::env::temp_dir()
                    .join(format!("redlock-reload-{}-{name}-{n}", std::process::id()))
            };
            let files = Self((0..2).map(path).collect());
            files.write(0, "a");
            files.write(1, "b");
            files
        }

        fn write(&self, at: usize, text: &str) {
            std::fs::write(&self.0[at], text).unwrap();
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            self.0.iter().for_each(|path| drop(std::fs::remove_file(path)));
        }
    }

    async fn says_nothing(watched: &mut Watched) {
        assert!(tokio::time::timeout(LOOK * 5, watched.changed()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn other_contents_are_seen_together_and_the_same_ones_are_not() {
        let files = Files::new("contents");
        let mut watched = Watched::new(files.0.clone(), &Reload::default());
        assert_eq!(watched.contents(), [Ok(b"a".to_vec()), Ok(b"b".to_vec())]);
        files.write(0, "c");
        let second = async {
            tokio::time::sleep(LOOK + SETTLE / 2).await;
            files.write(1, "d");
        };
        tokio::join!(watched.changed(), second);
        assert_eq!(watched.contents(), [Ok(b"c".to_vec()), Ok(b"d".to_vec())]);
        files.write(0, "c");
        says_nothing(&mut watched).await;
        std::fs::remove_file(&files.0[1]).unwrap();
        watched.changed().await;
        assert!(watched.contents()[1].is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_to_reload_is_seen_once_by_every_watcher() {
        let files = Files::new("word");
        let reload = Reload::default();
        let mut both = [(); 2].map(|()| Watched::new(files.0.clone(), &reload));
        reload.trigger();
        for watched in &mut both {
            watched.changed().await;
            says_nothing(watched).await;
        }
    }
}
