//! Serves the console, a page with held locks, waiters and masters, and the history for its charts.
//! The files are embedded unchanged. They hold no secrets, so no key is needed. The page asks for a key
//! if the gateway requires one.

use std::time::Instant;

use axum::response::Response;
use http::StatusCode;
use serde::Serialize;

use super::access::Access;
use super::error::ApiError;
use super::render::json_response;

/// The page.
pub(super) const INDEX: &str = include_str!("console/index.html");

/// A file of the page: its name in the path, its media type and its text.
pub(super) struct File {
    pub(super) name: &'static str,
    pub(super) kind: &'static str,
    pub(super) text: &'static str,
}

const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLES: &str = "text/css; charset=utf-8";

macro_rules! files {
    ($($name:literal: $kind:ident,)+) => {
        &[$(File { name: $name, kind: $kind, text: include_str!(concat!("console/", $name)) }),+]
    };
}

/// The files that the documentation's pages have too.
pub(super) const SHARED: [File; 3] = [
    File { name: "icon.svg", kind: "image/svg+xml", text: include_str!("icon.svg") },
    File { name: "icon-bad.svg", kind: "image/svg+xml", text: include_str!("icon-bad.svg") },
    File { name: "palette.css", kind: STYLES, text: include_str!("palette.css") },
];

/// The other files.
pub(super) const FILES: &[File] = files! {
    "console.css": STYLES,
    "api.js": SCRIPT,
    "bars.js": SCRIPT,
    "charts.js": SCRIPT,
    "commands.js": SCRIPT,
    "details.js": SCRIPT,
    "dialogs.js": SCRIPT,
    "dom.js": SCRIPT,
    "feed.js": SCRIPT,
    "folders.js": SCRIPT,
    "force.js": SCRIPT,
    "format.js": SCRIPT,
    "key.js": SCRIPT,
    "lines.js": SCRIPT,
    "locks.js": SCRIPT,
    "main.js": SCRIPT,
    "masters.js": SCRIPT,
    "sse.js": SCRIPT,
    "status.js": SCRIPT,
    "stream.js": SCRIPT,
    "table.js": SCRIPT,
    "theme.js": SCRIPT,
    "words.js": SCRIPT,
};

/// The history in columns, oldest sample first.
#[derive(Default, Serialize)]
struct History {
    age_ms: Vec<u64>,
    length_ms: Vec<u64>,
    grants: Vec<u64>,
    refusals: Vec<u64>,
    handoffs: Vec<u64>,
    waiting: Vec<usize>,
}

/// The samples of the last five minutes. A sample has an age, not a time, so the clock of the browser
/// does not matter.
pub(super) async fn history(access: Access) -> Result<Response, ApiError> {
    let samples = access.gateway().history();
    let now = Instant::now();
    let mut history = History::default();
    for sample in samples {
        history.age_ms.push((now - sample.ended).as_millis() as u64);
        history.length_ms.push(sample.length.as_millis() as u64);
        history.grants.push(sample.counts.grants);
        history.refusals.push(sample.counts.refusals);
        history.handoffs.push(sample.counts.handoffs);
        history.waiting.push(sample.waiting);
    }
    json_response(StatusCode::OK, &history)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_file_of_the_folder_is_served() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/http/console");
        let names = std::fs::read_dir(folder).expect("a folder").map(|entry| {
            entry.expect("an entry").file_name().into_string().expect("a name in UTF-8")
        });
        let there: BTreeSet<_> = names.filter(|name| name != "index.html").collect();
        let served: BTreeSet<_> = FILES.iter().map(|file| file.name.to_owned()).collect();
        assert_eq!(served, there);
    }
}
