//! What `redlock top` draws, and what its keys do. Knows no terminal and no gateway.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::{Duration, Instant, SystemTime};

use ratatui::Frame;
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};
use redlock_client::{Health, WatchEvent};

use super::locks::{Hold, Locks, Sort};

/// Narrower screens leave out when a hold began, and then the fencing token.
const WIDTH_WITH_SINCE: u16 = 100;
const WIDTH_WITH_TOKEN: u16 = 72;
/// How much of a scroll is one page, if the screen is too small to tell.
const SMALLEST_PAGE: usize = 1;
/// What stands for a value that is absent or hidden from the key.
const ABSENT: &str = "-";
const READY: &str = "ready";
/// The state of a master that votes and has all locks.
const ADMITTED: &str = "admitted";

/// What is known of the masters.
#[derive(Debug, Default)]
pub(super) enum Masters {
    #[default]
    Unasked,
    /// The key may not ask.
    Hidden,
    Known(Health),
    /// No gateway answers. The text says why.
    Unknown(String),
}

/// The stream of events.
#[derive(Debug)]
enum Link {
    /// No gateway has sent a snapshot yet.
    Waiting {
        gateway: Option<String>,
    },
    Connected {
        gateway: String,
    },
    /// The locks on the screen are those of this time (RFC 3339).
    Lost {
        since: String,
        why: String,
    },
}

/// The screen.
#[derive(Debug)]
pub(super) struct View {
    prefix: String,
    locks: Locks,
    link: Link,
    pub(super) masters: Masters,
    sort: Sort,
    filter: String,
    /// Whether keys go to the filter.
    is_typing: bool,
    /// The first row on the screen.
    first_row: usize,
    /// How many rows the screen had when it was drawn last.
    page: usize,
}

impl View {
    pub(super) fn new(prefix: String) -> Self {
        Self {
            prefix,
            locks: Locks::default(),
            link: Link::Waiting { gateway: None },
            masters: Masters::default(),
            sort: Sort::default(),
            filter: String::new(),
            is_typing: false,
            first_row: 0,
            page: SMALLEST_PAGE,
        }
    }

    pub(super) fn note(&mut self, event: &WatchEvent, now: Instant, time: SystemTime) {
        self.locks.note(event, now);
        let link = std::mem::replace(&mut self.link, Link::Waiting { gateway: None });
        self.link = match (link, event) {
            (Link::Lost { since, .. }, WatchEvent::Disconnected { why }) => {
                Link::Lost { since, why: why.clone() }
            }
            (_, WatchEvent::Disconnected { why }) => {
                let since = humantime::format_rfc3339_seconds(time).to_string();
                Link::Lost { since, why: why.clone() }
            }
            // The stream goes on where it was cut, or a snapshot follows.
            (Link::Lost { .. }, WatchEvent::Connected { gateway }) => {
                Link::Connected { gateway: gateway.clone() }
            }
            (_, WatchEvent::Connected { gateway }) => {
                Link::Waiting { gateway: Some(gateway.clone()) }
            }
            (Link::Waiting { gateway: Some(gateway) }, WatchEvent::Snapshot(_)) => {
                Link::Connected { gateway }
            }
            (link, _) => link,
        };
    }

    /// Takes a key. Breaks if the user quits.
    pub(super) fn take(&mut self, event: &Event) -> ControlFlow<()> {
        let Event::Key(key) = event else { return ControlFlow::Continue(()) };
        if key.kind == KeyEventKind::Release {
            return ControlFlow::Continue(());
        }
        let is_interrupt =
            key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        if is_interrupt || !self.is_typing && key.code == KeyCode::Char('q') {
            return ControlFlow::Break(());
        }
        match self.is_typing {
            true => self.type_filter(*key),
            false => self.command(key.code),
        }
        ControlFlow::Continue(())
    }

    fn type_filter(&mut self, key: KeyEvent) {
        self.first_row = 0;
        match key.code {
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.is_typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(typed) if !key.modifiers.contains(KeyModifiers::CONTROL) => {
                self.filter.push(typed);
            }
            _ => {}
        }
    }

    fn command(&mut self, key: KeyCode) {
        match key {
            KeyCode::Char('n') => self.sort = Sort::Name,
            KeyCode::Char('t') => self.sort = Sort::TimeLeft,
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Up | KeyCode::Char('k') => self.first_row = self.first_row.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.first_row = self.first_row.saturating_add(1),
            KeyCode::PageUp => self.first_row = self.first_row.saturating_sub(self.page),
            KeyCode::PageDown => self.first_row = self.first_row.saturating_add(self.page),
            KeyCode::Home => self.first_row = 0,
            KeyCode::End => self.first_row = usize::MAX,
            _ => {}
        }
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>, now: Instant) {
        let one = Constraint::Length(1);
        let [title, link, masters, table, keys] =
            Layout::vertical([one, one, one, Constraint::Fill(1), one]).areas(frame.area());
        let rows = self.locks.rows(&self.filter, self.sort);
        // The first row of the table shows the column names.
        self.page = usize::from(table.height).saturating_sub(1).max(SMALLEST_PAGE);
        self.first_row = self.first_row.min(rows.len().saturating_sub(self.page));
        let shown: Vec<_> = rows.iter().skip(self.first_row).take(self.page).collect();
        frame.render_widget(self.title(rows.len()), title);
        frame.render_widget(self.link_line(), link);
        frame.render_widget(Paragraph::new(masters_line(&self.masters)), masters);
        if rows.is_empty() {
            frame.render_widget(Text::from(self.nothing()).dim(), table);
        } else {
            self.draw_table(frame, table, &shown, now);
        }
        frame.render_widget(self.keys_line(), keys);
    }

    fn title(&self, rows: usize) -> Line<'_> {
        let total = self.locks.len();
        let more = if self.locks.are_more_held { "more than " } else { "" };
        let locks = if total == 1 { "hold" } else { "holds" };
        let mut words = vec!["redlock top".bold(), format!("  {more}{total} {locks}").into()];
        if !self.prefix.is_empty() {
            words.push(format!(" below {}", self.prefix).into());
        }
        if !self.filter.is_empty() {
            words.push(format!(", {rows} with {:?}", self.filter).yellow());
        }
        words.push(Span::from(match self.sort {
            Sort::Name => ", by name",
            Sort::TimeLeft => ", by time left",
        }));
        Line::from(words)
    }

    fn link_line(&self) -> Line<'_> {
        match &self.link {
            Link::Connected { gateway } => Line::from(format!("connected to {gateway}")).green(),
            Link::Waiting { gateway: None } => Line::from("connecting").yellow(),
            Link::Waiting { gateway: Some(gateway) } => {
                Line::from(format!("connected to {gateway}, waiting for the locks")).yellow()
            }
            Link::Lost { since, why } => {
                let words = format!("reconnecting; the screen is as of {since}: {why}");
                Line::styled(words, Style::new().fg(Color::Red).add_modifier(Modifier::BOLD))
            }
        }
    }

    fn nothing(&self) -> &'static str {
        match (&self.link, self.locks.len()) {
            (Link::Waiting { .. }, _) => "",
            (_, 0) => "no lock is held",
            _ => "no lock matches the filter",
        }
    }

    fn keys_line(&self) -> Line<'_> {
        if self.is_typing {
            let typed = format!("/{}_", self.filter);
            return Line::from(vec![typed.bold(), "  Enter: keep  Esc: show all".dim()]);
        }
        Line::from("q quit  n by name  t by time left  / filter  ↑↓ scroll").dim()
    }

    fn draw_table(&self, frame: &mut Frame<'_>, area: Rect, rows: &[&&Hold], now: Instant) {
        let has_since = area.width >= WIDTH_WITH_SINCE;
        let has_token = area.width >= WIDTH_WITH_TOKEN;
        // In the order of `cells`.
        let columns = [
            (true, "NAME", Constraint::Fill(3)),
            (true, "SLOT", Constraint::Length(7)),
            (true, "HOLDER", Constraint::Fill(3)),
            (has_since, "SINCE", Constraint::Length(20)),
            (true, "LEFT", Constraint::Length(8)),
            (has_token, "TOKEN", Constraint::Length(17)),
            (true, "WAIT", Constraint::Length(5)),
        ];
        let is_shown: Vec<_> = columns.iter().map(|(is_shown, ..)| *is_shown).collect();
        let chosen = |cells: Vec<Cell<'static>>| {
            Row::new(cells.into_iter().zip(&is_shown).filter_map(|(cell, is)| is.then_some(cell)))
        };
        let header = chosen(columns.iter().map(|(_, name, _)| Cell::from(*name)).collect());
        let rows = rows.iter().map(|hold| chosen(self.cells(hold, now)));
        let widths = columns.iter().filter(|(is_shown, ..)| *is_shown).map(|(.., width)| *width);
        let style = match self.link {
            Link::Lost { .. } => Style::new().dim(),
            _ => Style::new(),
        };
        let table = Table::new(rows, widths).style(style).header(header.reversed());
        frame.render_stateful_widget(table, area, &mut TableState::default());
    }

    fn cells(&self, hold: &Hold, now: Instant) -> Vec<Cell<'static>> {
        let or_absent = |text: Option<String>| text.unwrap_or_else(|| ABSENT.into());
        let right = |text: String| Cell::from(Text::from(text).alignment(Alignment::Right));
        let slot = match hold.slots {
            Some(slots) => format!("{}/{slots}", hold.slot),
            None if hold.slot > 1 => hold.slot.to_string(),
            None => String::new(),
        };
        let waiters = match self.locks.waiters(&hold.name) {
            0 => String::new(),
            total => total.to_string(),
        };
        let left = hold.left(now);
        let left_style = match left {
            Some(left) if left < Duration::from_secs(5) => Style::new().fg(Color::Yellow),
            _ => Style::new(),
        };
        vec![
            Cell::from(hold.name.clone()),
            Cell::from(slot),
            Cell::from(or_absent(hold.holder.clone())),
            Cell::from(or_absent(hold.acquired_at.as_deref().map(to_the_second))),
            right(or_absent(left.map(in_words))).style(left_style),
            right(or_absent(hold.fencing_token.map(|token| token.to_string()))),
            right(waiters),
        ]
    }
}

/// The state of the gateway and of its masters.
fn masters_line(masters: &Masters) -> Line<'static> {
    let health = match masters {
        Masters::Unasked => return Line::default(),
        Masters::Hidden => return Line::from("masters: hidden from this key").dim(),
        Masters::Unknown(why) => return Line::from(format!("masters: unknown, {why}")).red(),
        Masters::Known(health) => health,
    };
    let gateway = format!("gateway {}", health.status);
    let gateway = if health.status == READY { gateway.green() } else { gateway.red() };
    let Some(nodes) = &health.nodes else {
        return Line::from(vec![gateway, "  masters: hidden from this key".dim()]);
    };
    let mut by_state = BTreeMap::<&str, Vec<&str>>::new();
    for node in nodes {
        by_state.entry(&node.state).or_default().push(&node.node);
    }
    let states = by_state.iter().map(|(state, nodes)| match *state {
        ADMITTED => format!("{} {state}", nodes.len()),
        _ => format!("{} {state} ({})", nodes.len(), nodes.join(", ")),
    });
    let states = format!("  masters: {}", states.collect::<Vec<_>>().join(", "));
    let are_all_admitted = by_state.keys().all(|state| *state == ADMITTED);
    Line::from(vec![gateway, if are_all_admitted { states.into() } else { states.yellow() }])
}

/// A time (RFC 3339) without fractions of a second.
fn to_the_second(time: &str) -> String {
    match time.split_once('.') {
        Some((seconds, _)) if time.ends_with('Z') => format!("{seconds}Z"),
        _ => time.to_owned(),
    }
}

fn in_words(left: Duration) -> String {
    let seconds = left.as_secs();
    match seconds {
        0..60 => format!("{:.1} s", left.as_secs_f64()),
        60..3600 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h {:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use redlock_client::Snapshot;
    use serde_json::{Value, from_value, json};

    use super::*;

    /// The lines of the screen.
    fn drawn(view: &mut View, width: u16, height: u16, now: Instant) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame, now)).unwrap();
        let buffer = terminal.backend().buffer();
        let cells: Vec<_> = buffer.content().iter().map(|cell| cell.symbol()).collect();
        cells
            .chunks(usize::from(width).max(1))
            .map(|line| line.concat().trim_end().to_owned())
            .collect()
    }

    fn view(locks: &Value, now: Instant) -> View {
        let mut view = View::new("jobs/".into());
        let connected = WatchEvent::Connected { gateway: "http://gateway".into() };
        view.note(&connected, now, SystemTime::UNIX_EPOCH);
        let snapshot = json!({ "locks": locks, "is_complete": true });
        let snapshot = WatchEvent::Snapshot(Snapshot::Prefix(from_value(snapshot).unwrap()));
        view.note(&snapshot, now, SystemTime::UNIX_EPOCH);
        view
    }

    fn two_locks() -> Value {
        json!([
            { "name": "jobs/b", "state": "held", "owner": "bob \u{1b}[31m", "slot": 2, "slots": 4,
              "fencing_token": 1795264376745354_u64, "expires_in_ms": 4_200,
              "acquired_at": "2026-11-21T12:33:56.171Z", "waiters_total": 3 },
            { "name": "jobs/a", "state": "held", "owner": "alice", "expires_in_ms": 3_725_000,
              "fencing_token": 1795264376745353_u64, "acquired_at": "2026-11-21T12:32:56.171Z" },
        ])
    }

    fn press(view: &mut View, keys: &str) -> ControlFlow<()> {
        keys.chars().try_for_each(|key| {
            let code = match key {
                '\n' => KeyCode::Enter,
                '\u{1b}' => KeyCode::Esc,
                '\u{8}' => KeyCode::Backspace,
                key => KeyCode::Char(key),
            };
            view.take(&Event::Key(code.into()))
        })
    }

    #[test]
    fn screen_shows_each_hold_in_a_row() {
        let now = Instant::now();
        let mut view = view(&two_locks(), now);
        let lines = drawn(&mut view, 110, 8, now);
        assert_eq!(lines[0], "redlock top  2 holds below jobs/, by name");
        assert_eq!(lines[1], "connected to http://gateway");
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words(&lines[3]), "NAME SLOT HOLDER SINCE LEFT TOKEN WAIT");
        let alice = "jobs/a alice 2026-11-21T12:32:56Z 1h 02m 1795264376745353";
        assert_eq!(words(&lines[4]), alice);
        let bob = "jobs/b 2/4 bob [31m 2026-11-21T12:33:56Z 4.2 s 1795264376745354 3";
        assert_eq!(words(&lines[5]), bob);
        assert!(lines[7].starts_with("q quit"), "{lines:#?}");
        let later = drawn(&mut view, 110, 8, now + Duration::from_secs(4));
        assert!(later[5].contains("0.2 s"), "{later:#?}");
    }

    #[test]
    fn narrow_screens_leave_columns_out() {
        let now = Instant::now();
        let mut view = view(&two_locks(), now);
        for (width, has_since, has_token) in
            [(100, true, true), (80, false, true), (60, false, false)]
        {
            let lines = drawn(&mut view, width, 8, now);
            let has = |text| lines.iter().any(|line| line.contains(text));
            assert_eq!((has("SINCE"), has("17952643")), (has_since, has_token), "{lines:#?}");
            assert!(has("jobs/a") && has("alice") && has("1h 02m"), "{lines:#?}");
        }
        for (width, height) in [(1, 1), (0, 0), (5, 4), (200, 2)] {
            drawn(&mut view, width, height, now);
        }
    }

    #[test]
    fn keys_sort_filter_and_quit() {
        let now = Instant::now();
        let mut view = view(&two_locks(), now);
        assert!(press(&mut view, "t").is_continue());
        let lines = drawn(&mut view, 80, 8, now);
        assert!(lines[4].starts_with("jobs/b") && lines[5].starts_with("jobs/a"), "{lines:#?}");
        assert!(press(&mut view, "n/qlq").is_continue(), "q is typed");
        assert_eq!(drawn(&mut view, 80, 8, now)[3], "no lock matches the filter");
        assert!(press(&mut view, "\u{8}\u{8}\u{8}ALI").is_continue());
        let lines = drawn(&mut view, 80, 8, now);
        assert!(lines[0].contains("1 with \"ALI\"") && lines[7].starts_with("/ALI_"), "{lines:#?}");
        assert!(lines[4].starts_with("jobs/a") && lines[5].is_empty(), "{lines:#?}");
        assert!(press(&mut view, "\n\u{1b}").is_continue());
        assert!(drawn(&mut view, 80, 8, now)[5].starts_with("jobs/b"));
        assert!(press(&mut view, "q").is_break());
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(view.take(&Event::Key(interrupt)).is_break());
    }

    #[test]
    fn scrolling_ends_at_the_last_row() {
        let now = Instant::now();
        let lock = |n: usize| json!({ "name": format!("jobs/{n:03}"), "state": "held" });
        let mut view = view(&(0..100).map(lock).collect(), now);
        let first = |view: &mut View| drawn(view, 80, 14, now)[4].clone();
        for (key, row) in [
            (KeyCode::Down, "jobs/001"),
            (KeyCode::PageDown, "jobs/010"),
            (KeyCode::End, "jobs/091"),
            (KeyCode::Down, "jobs/091"),
            (KeyCode::PageUp, "jobs/082"),
            (KeyCode::Home, "jobs/000"),
            (KeyCode::Up, "jobs/000"),
        ] {
            let _ = view.take(&Event::Key(key.into()));
            assert!(first(&mut view).starts_with(row), "{key:?}: {}", first(&mut view));
        }
    }

    #[test]
    fn lost_connection_is_shown_until_the_next() {
        let now = Instant::now();
        let mut view = view(&two_locks(), now);
        let cut = |why: &str| WatchEvent::Disconnected { why: why.into() };
        view.note(&cut("cut"), now, SystemTime::UNIX_EPOCH);
        view.note(&cut("refused"), now, SystemTime::now());
        let lines = drawn(&mut view, 100, 8, now);
        let lost = "reconnecting; the screen is as of 1970-01-01T00:00:00Z: refused";
        assert_eq!(lines[1], lost);
        assert!(lines[4].starts_with("jobs/a"), "{lines:#?}");
        let connected = WatchEvent::Connected { gateway: "http://other".into() };
        view.note(&connected, now, SystemTime::now());
        assert_eq!(drawn(&mut view, 100, 8, now)[1], "connected to http://other");
    }

    #[test]
    fn masters_that_do_not_vote_are_named() {
        let line = |masters| masters_line(&masters).to_string();
        let node = |node: &str, state: &str| json!({ "node": node, "state": state, "since": "x", "restarts": 0, "evicted_keys": 0 });
        let nodes = [node("a:1", "admitted"), node("b:1", "refused"), node("c:1", "admitted")];
        let health = json!({ "status": "ready", "nodes": nodes });
        let known = line(Masters::Known(from_value(health).unwrap()));
        assert_eq!(known, "gateway ready  masters: 2 admitted, 1 refused (b:1)");
        let hidden = line(Masters::Known(from_value(json!({ "status": "no_quorum" })).unwrap()));
        assert_eq!(hidden, "gateway no_quorum  masters: hidden from this key");
        assert_eq!(line(Masters::Unknown("no answer".into())), "masters: unknown, no answer");
    }

    #[test]
    fn times_left_are_short() {
        let shown = [200, 59_900, 60_000, 3_599_000, 3_600_000, 90_061_000];
        let shown = shown.map(|left| in_words(Duration::from_millis(left)));
        assert_eq!(shown, ["0.2 s", "59.9 s", "1m 00s", "59m 59s", "1h 00m", "25h 01m"]);
    }
}
