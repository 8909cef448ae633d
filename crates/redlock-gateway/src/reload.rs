//! Finds out when the gateway must use files anew: their contents have changed, or an operator has
//! ordered a reload.
//!
//! The files are read, and their contents compared, once a second. Notifications of the file system
//! would not do: they miss changes of files on other machines, and of the links that Kubernetes
//! redirects when a secret changes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// Time between two reads of the files.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long contents must stay the same before a change is reported. Several files, such as a
/// certificate and its key, are replaced one by one.
const SETTLE: Duration = Duration::from_millis(200);
/// Limit on a file, in bytes: enough for thousands of keys or certificates.
const LARGEST: u64 = 4 << 20;
/// How many times the files are read again while their contents still change, once every
/// [`SETTLE`]. Then the change is reported as it is: a file that changes all the time must not hide
/// the changes of the others.
const MAX_READS: u32 = 10;

/// An operator's order to read all files again. Every watcher gets it.
#[derive(Debug, Clone)]
pub struct Reload(Arc<watch::Sender<()>>);

impl Default for Reload {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(())))
    }
}

impl Reload {
    /// Makes every watcher report its files, changed or not.
    pub fn trigger(&self) {
        self.0.send_replace(());
    }
}

/// The content of a file, or why it cannot be read.
pub(crate) type Content = Result<Vec<u8>, ReadError>;

/// Why a file cannot be read.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ReadError {
    #[error(transparent)]
    Io(Arc<io::Error>),
    #[error("it is not a regular file")]
    NotRegular,
    #[error("it has {0} bytes; allowed are {LARGEST}")]
    TooLarge(u64),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

impl PartialEq for ReadError {
    fn eq(&self, other: &Self) -> bool {
        let cause = |error: &io::Error| (error.kind(), error.raw_os_error());
        match (self, other) {
            (Self::Io(one), Self::Io(other)) => cause(one) == cause(other),
            (Self::NotRegular, Self::NotRegular) => true,
            (Self::TooLarge(one), Self::TooLarge(other)) => one == other,
            (Self::Io(_) | Self::NotRegular | Self::TooLarge(_), _) => false,
        }
    }
}

/// Files whose contents are in use.
pub(crate) struct Watched {
    paths: Arc<[PathBuf]>,
    contents: Vec<Content>,
    asked: watch::Receiver<()>,
    /// Keeps the channel of `asked` open.
    _reload: Reload,
}

impl Watched {
    /// Reads the files.
    pub(crate) fn new(paths: Vec<PathBuf>, reload: &Reload) -> Self {
        let contents = read(&paths);
        Self { paths: paths.into(), contents, asked: reload.0.subscribe(), _reload: reload.clone() }
    }

    /// The contents in use, in the order of the paths. They are those of the last report of
    /// [`Self::changed`], or of [`Self::new`].
    pub(crate) fn contents(&self) -> &[Content] {
        &self.contents
    }

    /// Resolves when the contents differ from those in use, or a reload was ordered. Not
    /// cancel-safe: if the future is dropped before it resolves, an order may be lost.
    pub(crate) async fn changed(&mut self) {
        loop {
            let asked = tokio::time::timeout(INTERVAL, self.asked.changed()).await.is_ok();
            let mut now = self.read_again().await;
            if !asked && now == self.contents {
                continue;
            }
            for _ in 0..MAX_READS {
                tokio::time::sleep(SETTLE).await;
                let before = std::mem::replace(&mut now, self.read_again().await);
                if now == before {
                    break;
                }
            }
            // Without an order, a change that was reverted meanwhile is not reported.
            if asked || now != self.contents {
                self.contents = now;
                return;
            }
        }
    }

    /// Reads the files on a blocking thread: a slow disk must not delay requests.
    async fn read_again(&self) -> Vec<Content> {
        let paths = self.paths.clone();
        tokio::task::spawn_blocking(move || read(&paths))
            .await
            .unwrap_or_else(|_| self.contents.clone())
    }
}

/// The contents of these files now.
pub(crate) fn read(paths: &[PathBuf]) -> Vec<Content> {
    paths.iter().map(|path| read_one(path)).collect()
}

/// Reads a regular file of limited size. Other files are refused: a read from a pipe, for example,
/// might never end.
pub(crate) fn read_one(path: &Path) -> Content {
    let found = std::fs::metadata(path)?;
    if !found.is_file() {
        return Err(ReadError::NotRegular);
    }
    if found.len() > LARGEST {
        return Err(ReadError::TooLarge(found.len()));
    }
    Ok(std::fs::read(path)?)
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
        assert!(tokio::time::timeout(INTERVAL * 5, watched.changed()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn only_changed_contents_are_reported_and_together() {
        let files = Files::new("contents");
        let mut watched = Watched::new(files.0.clone(), &Reload::default());
        assert_eq!(watched.contents(), [Ok(b"a".to_vec()), Ok(b"b".to_vec())]);
        files.write(0, "c");
        let second = async {
            tokio::time::sleep(INTERVAL + SETTLE / 2).await;
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
    async fn every_watcher_reports_a_reload_once() {
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
