//! Workers that repeat their work until they are stopped. They are spread over a few threads, each
//! with its own runtime, which costs less than one runtime that shares its tasks. A worker reads
//! the phase to decide whether to count, and returns its result at the end. If one worker fails,
//! the measurement ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

const RUN: u8 = 0;
const COUNT: u8 = 1;
const STOP: u8 = 2;

/// The phase: the current instruction to all workers.
#[derive(Clone)]
pub(crate) struct Phase(Arc<AtomicU8>);

impl Phase {
    pub(crate) fn counts(&self) -> bool {
        self.0.load(Ordering::Relaxed) == COUNT
    }

    pub(crate) fn stops(&self) -> bool {
        self.0.load(Ordering::Relaxed) == STOP
    }
}

/// Workers that run until they are stopped or dropped.
pub(crate) struct WorkerPool<T> {
    phase: Phase,
    results: mpsc::UnboundedReceiver<Result<Vec<T>, String>>,
}

impl<T: Send + 'static> WorkerPool<T> {
    /// Starts the workers. `work` gets the worker's number n, counted from 0, and runs on the
    /// thread with the number n modulo `threads`. `threads` must not exceed `workers`.
    pub(crate) fn start<F>(
        workers: u32,
        threads: u32,
        work: impl Fn(u32, Phase) -> F + Clone + Send + 'static,
    ) -> Result<Self, String>
    where
        F: Future<Output = Result<T, String>> + Send + 'static,
    {
        let phase = Phase(Arc::new(AtomicU8::new(RUN)));
        let (done, results) = mpsc::unbounded_channel();
        let pool = Self { phase, results };
        for thread in 0..threads {
            let work = work.clone();
            let phase = pool.phase.clone();
            let done = done.clone();
            let run = move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                let result = match runtime {
                    Ok(runtime) => runtime.block_on(async {
                        let mine = (thread..workers).step_by(threads as usize);
                        gather(mine.map(|worker| work(worker, phase.clone())).collect()).await
                    }),
                    Err(error) => Err(format!("cannot start a runtime: {error}")),
                };
                // This fails only if the measurement has already failed.
                let _ = done.send(result);
            };
            std::thread::Builder::new()
                .name("load".into())
                .spawn(run)
                .map_err(|error| format!("cannot start a thread: {error}"))?;
        }
        Ok(pool)
    }

    /// Lets the workers run for this time. Fails if they end before.
    pub(crate) async fn run_for(&mut self, time: Duration) -> Result<(), String> {
        match timeout(time, self.results.recv()).await {
            Err(_) => Ok(()),
            Ok(Some(Err(error))) => Err(error),
            Ok(Some(Ok(_)) | None) => Err("the load ended by itself".into()),
        }
    }

    pub(crate) fn count(&self, on: bool) {
        self.phase.0.store(if on { COUNT } else { RUN }, Ordering::Relaxed);
    }

    /// Stops the workers. Each finishes its present step, so that it leaves no lock behind.
    pub(crate) async fn stop(self, within: Duration) -> Result<Vec<T>, String> {
        self.phase.0.store(STOP, Ordering::Relaxed);
        self.finish(within).await
    }

    /// Waits for workers that end by themselves.
    pub(crate) async fn finish(mut self, within: Duration) -> Result<Vec<T>, String> {
        let mut all = Vec::new();
        let gather = async {
            while let Some(results) = self.results.recv().await {
                all.extend(results?);
            }
            Ok(())
        };
        match timeout(within, gather).await {
            Ok(result) => result.map(|()| all),
            Err(_) => Err(format!("a request is still unanswered after {} s", within.as_secs())),
        }
    }
}

impl<T> Drop for WorkerPool<T> {
    fn drop(&mut self) {
        self.phase.0.store(STOP, Ordering::Relaxed);
    }
}

async fn gather<T: Send + 'static>(
    mut tasks: JoinSet<Result<T, String>>,
) -> Result<Vec<T>, String> {
    let mut all = Vec::with_capacity(tasks.len());
    while let Some(result) = tasks.join_next().await {
        all.push(result.map_err(|error| format!("a connection panicked: {error}"))??);
    }
    Ok(all)
}
