//! The documentation as web pages: the Markdown files of the source tree. A page is rendered at the
//! first request for it.
//!
//! Links between pages lead to the pages here. A link to a file that is not served becomes plain
//! text. Headings have the anchors that GitHub gives them. The pages have no scripts, and no styles
//! but those of `pages.css`, so they keep the policy for browsers.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use axum::body::Bytes;
use pulldown_cmark::{CowStr, Event, HeadingLevel, Options, Parser, Tag, TagEnd, html};

/// The style sheet of the pages.
pub(super) const STYLES: &str = include_str!("docs/pages.css");

/// A page: its name in the path, the file's place in the source tree, and its text.
struct Source {
    name: &'static str,
    file: &'static str,
    text: &'static str,
}

macro_rules! sources {
    ($($name:literal: $file:literal,)+) => {
        [$(Source { name: $name, file: $file, text: include_str!(concat!("../../../", $file)) }),+]
    };
}

/// All pages. The paths of the files begin in `crates/`.
const SOURCES: [Source; 22] = sources! {
    "configuration": "redlock-gateway/docs/configuration.md",
    "http": "redlock-gateway/docs/http.md",
    "operations": "redlock-gateway/docs/operations.md",
    "runbook": "redlock-gateway/docs/runbook.md",
    "security": "redlock-gateway/docs/security.md",
    "behind-a-proxy": "redlock-gateway/docs/behind-a-proxy.md",
    "servers": "redlock-gateway/docs/servers.md",
    "recipes": "redlock-gateway/docs/recipes.md",
    "faq": "redlock-gateway/docs/faq.md",
    "safety": "redlock-core/SAFETY.md",
    "architecture": "redlock-core/ARCHITECTURE.md",
    "adding-a-safety-rule": "redlock-core/docs/adding-a-safety-rule.md",
    "canonical-path": "redlock-core/docs/canonical-path.md",
    "clocks": "redlock-core/docs/clocks.md",
    "eligibility": "redlock-core/docs/eligibility.md",
    "fencing": "redlock-core/docs/fencing.md",
    "idempotency": "redlock-core/docs/idempotency.md",
    "quorum-and-validity": "redlock-core/docs/quorum-and-validity.md",
    "reconfiguration": "redlock-core/docs/reconfiguration.md",
    "recovery": "redlock-core/docs/recovery.md",
    "repair": "redlock-core/docs/repair.md",
    "waiting-and-handoff": "redlock-core/docs/waiting-and-handoff.md",
};

/// The pages that each page links to at its top.
const MAIN_PAGES: usize = 11;

/// Finds a page by its name. All answers share one copy of its HTML: a client may request the page
/// many times at once.
pub(super) fn page(name: &str) -> Option<Bytes> {
    static RENDERED: [OnceLock<Bytes>; SOURCES.len()] = [const { OnceLock::new() }; SOURCES.len()];
    let at = SOURCES.iter().position(|source| source.name == name)?;
    Some(RENDERED[at].get_or_init(|| rendered(&SOURCES[at]).into()).clone())
}

/// The links at the top of each page.
pub(super) fn navigation() -> String {
    let links = SOURCES[..MAIN_PAGES].iter();
    let links = links.map(|Source { name, .. }| format!("<a href=\"{name}\">{name}</a>\n"));
    let links: String = links.collect();
    let first = "<a href=\"./\">API</a>\n<a href=\"../console/\">console</a>\n";
    format!("<nav class=\"docs\">{first}{links}</nav>\n")
}

fn rendered(source: &Source) -> String {
    let mut body = String::new();
    let (title, events) = rewritten(source);
    html::push_html(&mut body, events.into_iter());
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title} - redlock-gateway</title>\n<link rel=\"stylesheet\" href=\"pages.css\">\n\
         </head>\n<body class=\"docs\">\n{}<main class=\"docs\">\n{body}</main>\n</body>\n</html>\n",
        navigation()
    )
}

/// The title of a page and its content, with anchors for the headings and links for the web.
fn rewritten(source: &Source) -> (String, Vec<Event<'static>>) {
    let options = Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH;
    let mut events: Vec<Event<'static>> =
        Parser::new_ext(source.text, options).map(Event::into_static).collect();
    let mut title = String::new();
    let mut anchors = Anchors::default();
    // Whether the link that is open leads to a file that is not served.
    let mut is_dropped = false;
    for at in 0..events.len() {
        match &events[at] {
            Event::Start(Tag::Heading { level, .. }) => {
                let level = *level;
                let text = text_until_heading_ends(&events[at..]);
                if level == HeadingLevel::H1 && title.is_empty() {
                    title = text.replace('<', "&lt;");
                }
                let id = Some(CowStr::from(anchors.next(&text)));
                events[at] = Event::Start(Tag::Heading {
                    level,
                    id,
                    classes: Vec::new(),
                    attrs: Vec::new(),
                });
            }
            Event::Start(Tag::Link { link_type, dest_url, title, id }) => {
                let served = target(source.file, dest_url);
                is_dropped = served.is_none();
                events[at] = match served {
                    Some(url) => Event::Start(Tag::Link {
                        link_type: *link_type,
                        dest_url: url.into(),
                        title: title.clone(),
                        id: id.clone(),
                    }),
                    None => Event::Text(CowStr::Borrowed("")),
                };
            }
            Event::End(TagEnd::Link) if is_dropped => {
                is_dropped = false;
                events[at] = Event::Text(CowStr::Borrowed(""));
            }
            // The files have no HTML of their own. If one gets some, it is shown as text.
            Event::Html(text) | Event::InlineHtml(text) => events[at] = Event::Text(text.clone()),
            _ => {}
        }
    }
    (title, events)
}

fn text_until_heading_ends(events: &[Event<'_>]) -> String {
    let inside = events.iter().take_while(|event| !matches!(event, Event::End(TagEnd::Heading(_))));
    let texts = inside.filter_map(|event| match event {
        Event::Text(text) | Event::Code(text) => Some(text.as_ref()),
        _ => None,
    });
    texts.collect()
}

/// Where a link of this file leads. `None` if it leads to a file that is not served.
fn target(file: &str, link: &str) -> Option<String> {
    if link.starts_with('#') || link.contains("://") {
        return Some(link.to_owned());
    }
    let (path, anchor) = link.split_once('#').map_or((link, ""), |(path, anchor)| (path, anchor));
    let mut parts: Vec<&str> = file.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    let file = parts.join("/");
    let page = SOURCES.iter().find(|source| source.file == file)?;
    let hash = if anchor.is_empty() { "" } else { "#" };
    Some(format!("{}{hash}{anchor}", page.name))
}

/// The anchors of the headings of one page.
#[derive(Default)]
struct Anchors(BTreeMap<String, usize>);

impl Anchors {
    /// The anchor of the next heading, as GitHub derives it: lower case, hyphens for spaces, no
    /// other punctuation, and a number if an earlier heading has the same text.
    fn next(&mut self, text: &str) -> String {
        let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
        let anchor: String = text.to_lowercase().chars().filter(kept).collect();
        let anchor = anchor.replace(' ', "-");
        let count = self.0.entry(anchor.clone()).or_default();
        *count += 1;
        if *count == 1 { anchor } else { format!("{anchor}-{}", *count - 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_are_those_of_github() {
        let mut anchors = Anchors::default();
        for (text, anchor) in [
            ("Quorum lost", "quorum-lost"),
            ("Changing the nodes or max_ttl", "changing-the-nodes-or-max_ttl"),
            ("Faster masters: the module", "faster-masters-the-module"),
            ("Retries", "retries"),
            ("Retries", "retries-1"),
        ] {
            assert_eq!(anchors.next(text), anchor);
        }
    }

    #[test]
    fn links_lead_to_pages_and_other_files_have_none() {
        let from = |link| target("redlock-gateway/docs/http.md", link);
        for (link, leads_to) in [
            ("runbook.md#upgrading-masters", Some("runbook#upgrading-masters")),
            ("../../redlock-core/SAFETY.md", Some("safety")),
            ("#retries", Some("#retries")),
            ("https://redis.io/#a", Some("https://redis.io/#a")),
            ("../../../.github/SECURITY.md", None),
            ("../src/lib.rs", None),
        ] {
            assert_eq!(from(link).as_deref(), leads_to, "{link}");
        }
    }
}
