//! `redlock top`: shows the held locks on the terminal.
//!
//! A thread reads the keys, and a task asks for the state of the masters. This module joins them
//! with the stream of events, and draws. It leaves to [`locks`] what is held, and to [`view`] what
//! is drawn.

mod locks;
mod view;

use std::io::IsTerminal;
use std::time::{Duration, Instant, SystemTime};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use redlock_client::{Client, Error, Health, Watched};
use tokio::sync::mpsc;

use self::view::{Masters, View};
use crate::args::Service;
use crate::outcome::ExitOutcome;
use crate::signals::StopSignals;

/// How often the screen is drawn. A key is shown at once.
const DRAW_INTERVAL: Duration = Duration::from_millis(200);
/// How often the state of the masters is read.
const MASTERS_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) async fn top(service: &Service, prefix: String, is_json: bool) -> ExitOutcome {
    if is_json {
        return ExitOutcome::Usage("top draws a screen; with --json, use `redlock watch`".into());
    }
    if !std::io::stdout().is_terminal() {
        return ExitOutcome::Usage(
            "top draws a screen, and standard output is not a terminal; \
             use `redlock watch --prefix P` or `redlock list`"
                .into(),
        );
    }
    let shown = async {
        let mut signals = StopSignals::new()
            .map_err(|error| ExitOutcome::Failed(format!("no signals: {error}")))?;
        let client = service.client()?;
        // The screen begins after this, so that a refusal is seen.
        let watching = client.watch(Watched::Prefix(prefix.clone())).await?;
        let mut screen = Screen::begin()?;
        let view = View::new(prefix);
        tokio::select! {
            outcome = show(&mut screen.0, view, watching, &client) => outcome,
            _ = signals.next() => Ok(()),
        }
    };
    shown.await.map_or_else(|outcome| outcome, |()| ExitOutcome::Done)
}

/// The terminal while it belongs to `top`. Dropping it restores the terminal, and so does a panic.
struct Screen(DefaultTerminal);

impl Screen {
    fn begin() -> Result<Self, ExitOutcome> {
        ratatui::try_init().map(Self).map_err(|error| {
            ratatui::restore();
            no_terminal(&error)
        })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

fn no_terminal(error: &std::io::Error) -> ExitOutcome {
    ExitOutcome::Failed(format!("the terminal: {error}"))
}

/// Draws until the user quits or the stream is refused.
async fn show(
    terminal: &mut DefaultTerminal,
    mut view: View,
    mut watching: redlock_client::Watching,
    client: &Client,
) -> Result<(), ExitOutcome> {
    let mut keys = keys()?;
    let mut masters = masters(client.clone());
    let mut draw = tokio::time::interval(DRAW_INTERVAL);
    draw.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            event = watching.next() => {
                view.note(&event?, Instant::now(), SystemTime::now());
                continue;
            }
            Some(state) = masters.recv() => {
                view.masters = state;
                continue;
            }
            key = keys.recv() => {
                // Without its terminal, nobody can quit.
                let key = key.ok_or_else(|| ExitOutcome::Failed("the terminal is gone".into()))?;
                if view.take(&key).is_break() {
                    return Ok(());
                }
            }
            _ = draw.tick() => {}
        }
        let drawn = terminal.draw(|frame| view.draw(frame, Instant::now()));
        drawn.map_err(|error| no_terminal(&error))?;
    }
}

/// Keys and changes of the terminal's size, read by a thread that ends with the process.
fn keys() -> Result<mpsc::Receiver<Event>, ExitOutcome> {
    let (sender, keys) = mpsc::channel(16);
    let read = move || {
        while let Ok(key) = event::read() {
            if sender.blocking_send(key).is_err() {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("keys".into()).spawn(read);
    thread.map(|_| keys).map_err(|error| ExitOutcome::Failed(format!("no thread: {error}")))
}

/// The state of the masters, every few seconds.
fn masters(client: Client) -> mpsc::Receiver<Masters> {
    let (sender, masters) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            let state = match client.nodes().await {
                Ok(report) => Masters::Known(Health::clone(&report)),
                Err(Error::Refused { .. }) => Masters::Hidden,
                Err(error) => Masters::Unknown(error.to_string()),
            };
            if sender.send(state).await.is_err() {
                return;
            }
            tokio::time::sleep(MASTERS_INTERVAL).await;
        }
    });
    masters
}
