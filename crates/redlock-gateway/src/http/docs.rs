//! The documentation as web pages: the Markdown files of the source tree. A page is rendered at the
//! first request for it.
//!
//! Links between pages lead to the pages here. A link to a file that is not served becomes plain
//! text. Headings have the anchors that GitHub gives them. The pages have no scripts, and no styles
//! but those of `pages.css`, so they keep the policy for browsers.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::OnceLock;

use axum::body::Bytes;
use pulldown_cmark::{CowStr, Event, HeadingLevel, Options, Parser, Tag, TagEnd, html};

/// The style sheet of the pages.
pub(super) const STYLES: &str =
    concat!(include_str!("palette.css"), include_str!("docs/pages.css"));

/// A page: its name in the path, the file's place in the source tree, and its text.
struct Source {
    name: &'static str,
    file: &'static str,
    text: &'static str,
}

/// A picture that a page shows, as [`Source`].
struct Picture {
    name: &'static str,
    file: &'static str,
    svg: &'static str,
}

macro_rules! sources {
    ($kind:ident, $text:ident, $($name:literal: $file:literal,)+) => {
        [$($kind { name: $name, file: $file, $text: include_str!(concat!("../../../../", $file)) }),+]
    };
}

/// All pages.
const SOURCES: [Source; 30] = sources! {Source, text,
    "": "README.md",
    "recipes": "crates/redlock-gateway/docs/recipes.md",
    "faq": "crates/redlock-gateway/docs/faq.md",
    "http": "crates/redlock-gateway/docs/http.md",
    "features": "crates/redlock-gateway/docs/features.md",
    "waiting": "crates/redlock-gateway/docs/waiting.md",
    "configuration": "crates/redlock-gateway/docs/configuration.md",
    "masters": "crates/redlock-gateway/docs/masters.md",
    "servers": "crates/redlock-gateway/docs/servers.md",
    "module": "crates/redlock-gateway/docs/module.md",
    "monitoring": "crates/redlock-gateway/docs/monitoring.md",
    "console": "crates/redlock-gateway/docs/console.md",
    "symptoms": "crates/redlock-gateway/docs/symptoms.md",
    "runbook": "crates/redlock-gateway/docs/runbook.md",
    "security": "crates/redlock-gateway/docs/security.md",
    "http2": "crates/redlock-gateway/docs/http2.md",
    "behind-a-proxy": "crates/redlock-gateway/docs/behind-a-proxy.md",
    "safety": "crates/redlock-core/SAFETY.md",
    "architecture": "crates/redlock-core/ARCHITECTURE.md",
    "quorum-and-validity": "crates/redlock-core/docs/quorum-and-validity.md",
    "fencing": "crates/redlock-core/docs/fencing.md",
    "eligibility": "crates/redlock-core/docs/eligibility.md",
    "recovery": "crates/redlock-core/docs/recovery.md",
    "repair": "crates/redlock-core/docs/repair.md",
    "idempotency": "crates/redlock-core/docs/idempotency.md",
    "waiting-and-handoff": "crates/redlock-core/docs/waiting-and-handoff.md",
    "clocks": "crates/redlock-core/docs/clocks.md",
    "reconfiguration": "crates/redlock-core/docs/reconfiguration.md",
    "canonical-path": "crates/redlock-core/docs/canonical-path.md",
    "adding-a-safety-rule": "crates/redlock-core/docs/adding-a-safety-rule.md",
};

/// The groups of the navigation: a title, and the name of the first page.
const GROUPS: [(&str, &str); 4] = [
    ("Begin", ""),
    ("HTTP API", "http"),
    ("Operation", "configuration"),
    ("How it works", "safety"),
];

const PICTURES: [Picture; 2] = sources! {Picture, svg,
    "overview.svg": "crates/redlock-gateway/docs/overview.svg",
    "hung.svg": "tests/bench/pictures/hung.svg",
};

/// The page that contains all others, so that a browser can search them.
const EVERYTHING: &str = "everything";

/// Finds a page by its name. All answers share one copy of its HTML: a client may request the page
/// many times at once.
pub(super) fn page(name: &str) -> Option<Bytes> {
    static RENDERED: [OnceLock<Bytes>; SOURCES.len()] = [const { OnceLock::new() }; SOURCES.len()];
    static ALL: OnceLock<Bytes> = OnceLock::new();
    if name == EVERYTHING {
        return Some(ALL.get_or_init(|| everything().into()).clone());
    }
    let at = SOURCES.iter().position(|source| source.name == name)?;
    Some(RENDERED[at].get_or_init(|| rendered(&SOURCES[at]).into()).clone())
}

/// Finds a picture by its name.
pub(super) fn picture(name: &str) -> Option<&'static str> {
    PICTURES.iter().find(|picture| picture.name == name).map(|picture| picture.svg)
}

/// The bar at the top of each page. `up` leads from the page to `/docs/`.
pub(super) fn bar(up: &str) -> String {
    let link = |to: &str, text: &str| format!("<a href=\"{up}{to}\">{text}</a>\n");
    format!(
        "<header class=\"docs\"><strong>{}</strong>\n{}{}{}{}</header>\n",
        link("./", "redlock-gateway"),
        link("api/", "API"),
        link("../console/", "console"),
        link(EVERYTHING, "search"),
        link("./#pages", "all pages"),
    )
}

/// The links to all pages.
fn navigation() -> String {
    let mut links = String::new();
    for Source { name, text, .. } in &SOURCES {
        if let Some((group, _)) = GROUPS.iter().find(|(_, first)| first == name) {
            let _ = write!(
                links,
                "{}<p>{group}</p>\n<ul>\n",
                if links.is_empty() { "" } else { "</ul>\n" }
            );
        }
        let to = if name.is_empty() { "./" } else { name };
        let title = escaped(title_of(text));
        let _ = writeln!(links, "<li><a href=\"{to}\">{title}</a></li>");
    }
    format!("<nav class=\"pages\" id=\"pages\" aria-label=\"Pages\">\n{links}</ul>\n</nav>\n")
}

/// The title of a page: its first line.
fn title_of(text: &str) -> &str {
    text.lines().next().unwrap_or_default().trim_start_matches(['#', ' '])
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('`', "")
}

fn rendered(source: &Source) -> String {
    let (sections, events) = rewritten(source);
    let body = html_of(events);
    let mut contents = String::new();
    for (anchor, title) in &sections {
        let title = escaped(title);
        let _ = writeln!(contents, "<li><a href=\"#{anchor}\">{title}</a></li>");
    }
    if sections.len() > 1 {
        contents = format!(
            "<nav class=\"contents\" aria-label=\"On this page\">\n<ul>\n{contents}</ul>\n</nav>\n"
        );
    }
    document(title_of(source.text), &format!("{contents}<main>\n{body}</main>\n"))
}

/// All pages in one. Their titles are headings of the second level, and their own anchors are left
/// out, because two pages may have the same.
fn everything() -> String {
    let mut body = String::from(
        "<h1>All pages</h1>\n<p>Search this page with your browser (Ctrl+F). The title of each part leads to its page.</p>\n",
    );
    for source in &SOURCES {
        let to = if source.name.is_empty() { "./" } else { source.name };
        let title = escaped(title_of(source.text));
        let _ = writeln!(body, "<h2><a href=\"{to}\">{title}</a></h2>");
        let (_, mut events) = rewritten(source);
        let end = events.iter().position(|event| matches!(event, Event::End(TagEnd::Heading(_))));
        events.drain(..=end.expect("a page begins with its title"));
        for event in &mut events {
            match event {
                Event::Start(Tag::Heading { level, id, .. }) => {
                    *id = None;
                    *level = deeper(*level);
                }
                Event::End(TagEnd::Heading(level)) => *level = deeper(*level),
                _ => {}
            }
        }
        // A link within the page leads to the page itself.
        body.push_str(&html_of(events).replace("href=\"#", &format!("href=\"{to}#")));
    }
    document("All pages", &format!("<main>\n{body}</main>\n"))
}

/// Code and tables scroll. With a tab index, the keyboard can scroll them too.
fn html_of(events: Vec<Event<'_>>) -> String {
    let mut text = String::new();
    html::push_html(&mut text, events.into_iter());
    ["<pre>", "<table>"]
        .into_iter()
        .fold(text, |text, tag| text.replace(tag, &tag.replace('>', " tabindex=\"0\">")))
}

fn deeper(level: HeadingLevel) -> HeadingLevel {
    HeadingLevel::try_from(level as usize + 1).unwrap_or(HeadingLevel::H6)
}

fn document(title: &str, content: &str) -> String {
    let title = if title == "redlock-gateway" {
        title.to_owned()
    } else {
        format!("{} - redlock-gateway", escaped(title))
    };
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<link rel=\"icon\" href=\"../console/icon.svg\">\n\
         <link rel=\"stylesheet\" href=\"pages.css\">\n\
         </head>\n<body class=\"docs\">\n{}<div class=\"docs\">\n{content}{}</div>\n</body>\n</html>\n",
        bar(""),
        navigation()
    )
}

/// The sections of a page, each with its anchor and title, and the content of the page, with anchors
/// for the headings and links for the web.
fn rewritten(source: &Source) -> (Vec<(String, String)>, Vec<Event<'static>>) {
    let options = Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH;
    let mut events: Vec<Event<'static>> =
        Parser::new_ext(source.text, options).map(Event::into_static).collect();
    let mut sections = Vec::new();
    let mut anchors = Anchors::default();
    // Whether the link that is open leads to a file that is not served.
    let mut is_dropped = false;
    for at in 0..events.len() {
        match &events[at] {
            Event::Start(Tag::Heading { level, .. }) => {
                let level = *level;
                let text = text_until_heading_ends(&events[at..]);
                let anchor = anchors.next(&text);
                let id = Some(CowStr::from(anchor.clone()));
                if level == HeadingLevel::H2 {
                    sections.push((anchor, text));
                }
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
            Event::Start(Tag::Image { link_type, dest_url, title, id }) => {
                let picture = PICTURES.iter().find(|picture| {
                    in_tree(source.file, dest_url).as_deref() == Some(picture.file)
                });
                events[at] = Event::Start(Tag::Image {
                    link_type: *link_type,
                    dest_url: picture.map_or("", |picture| picture.name).into(),
                    title: title.clone(),
                    id: id.clone(),
                });
            }
            // The files have no HTML of their own. If one gets some, it is shown as text.
            Event::Html(text) | Event::InlineHtml(text) => events[at] = Event::Text(text.clone()),
            _ => {}
        }
    }
    (sections, events)
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
    let file = in_tree(file, path)?;
    let page = SOURCES.iter().find(|source| source.file == file)?;
    let hash = if anchor.is_empty() { "" } else { "#" };
    let name = if page.name.is_empty() { "./" } else { page.name };
    Some(format!("{name}{hash}{anchor}"))
}

/// The place in the source tree of what a file names by this path. `None` if it is outside.
fn in_tree(file: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = file.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
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
    fn each_group_begins_with_a_page() {
        for (group, first) in GROUPS {
            assert!(SOURCES.iter().any(|source| source.name == first), "{group}: {first}");
        }
    }

    #[test]
    fn links_lead_to_pages_and_other_files_have_none() {
        let from = |link| target("crates/redlock-gateway/docs/http.md", link);
        for (link, leads_to) in [
            ("runbook.md#upgrading-masters", Some("runbook#upgrading-masters")),
            ("../../redlock-core/SAFETY.md", Some("safety")),
            ("#retries", Some("#retries")),
            ("https://redis.io/#a", Some("https://redis.io/#a")),
            ("../../../.github/SECURITY.md", None),
            ("../src/lib.rs", None),
            ("../../../README.md#try-it", Some("./#try-it")),
        ] {
            assert_eq!(from(link).as_deref(), leads_to, "{link}");
        }
    }
}
