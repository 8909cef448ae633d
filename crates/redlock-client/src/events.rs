//! Reads server-sent events (<https://html.spec.whatwg.org/multipage/server-sent-events.html>) from
//! the pieces of a body. A piece may end anywhere, also within a character.

use std::time::Duration;

/// Limit on the bytes of one event. The largest is the snapshot of a prefix: it has up to 10,000
/// locks.
const MAX_EVENT_BYTES: usize = 64 * 1024 * 1024;
/// The mark that may begin a text in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// One event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ServerEvent {
    /// The value of the `event` field. Empty if the field was absent.
    pub(crate) name: String,
    /// The lines of data, with a line feed between two of them.
    pub(crate) data: String,
}

/// An event, or a line of one, is longer than allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event has more than {MAX_EVENT_BYTES} bytes")]
pub(crate) struct EventTooLong;

/// The state between two pieces of a stream.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    /// The line that has begun.
    line: Vec<u8>,
    /// Whether a line has ended before.
    is_begun: bool,
    /// Whether the last byte was a carriage return. A line feed after it ends no further line.
    is_after_return: bool,
    /// The event that has begun. Every line of data ends with a line feed.
    event: ServerEvent,
    /// The id of the event that has begun, or of the last one.
    id: String,
    last_event_id: String,
    retry: Option<Duration>,
}

impl Parser {
    /// The id to send as `Last-Event-ID`. Empty without one.
    pub(crate) fn last_event_id(&self) -> &str {
        &self.last_event_id
    }

    /// The pause before a new connection that the server asks for.
    pub(crate) fn retry(&self) -> Option<Duration> {
        self.retry
    }

    /// Forgets what was read of an unfinished event. The next piece begins a new stream.
    pub(crate) fn restart(&mut self) {
        let (last_event_id, retry) = (std::mem::take(&mut self.last_event_id), self.retry);
        *self = Self { id: last_event_id.clone(), last_event_id, retry, ..Self::default() };
    }

    /// Reads a piece of the stream, and calls `complete` with each event that ends in it.
    pub(crate) fn read(
        &mut self,
        mut piece: &[u8],
        mut complete: impl FnMut(ServerEvent),
    ) -> Result<(), EventTooLong> {
        if !piece.is_empty() && std::mem::take(&mut self.is_after_return) {
            piece = piece.strip_prefix(b"\n").unwrap_or(piece);
        }
        while let Some(end) = memchr::memchr2(b'\n', b'\r', piece) {
            self.extend_line(&piece[..end])?;
            complete_line(self, &mut complete);
            let is_return = piece[end] == b'\r';
            piece = &piece[end + 1..];
            self.is_after_return = is_return && piece.is_empty();
            if is_return {
                piece = piece.strip_prefix(b"\n").unwrap_or(piece);
            }
        }
        self.extend_line(piece)
    }

    fn extend_line(&mut self, bytes: &[u8]) -> Result<(), EventTooLong> {
        if self.line.len() + bytes.len() + self.event.data.len() > MAX_EVENT_BYTES {
            return Err(EventTooLong);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn set(&mut self, field: &str, value: &str) {
        match field {
            "event" => value.clone_into(&mut self.event.name),
            "data" => {
                self.event.data.push_str(value);
                self.event.data.push('\n');
            }
            // An id with NUL cannot be sent back.
            "id" if !value.contains('\0') => value.clone_into(&mut self.id),
            "retry" if value.bytes().all(|byte| byte.is_ascii_digit()) => {
                self.retry = value.parse().ok().map(Duration::from_millis);
            }
            _ => {}
        }
    }
}

/// Uses the line that has just ended.
fn complete_line(parser: &mut Parser, complete: &mut impl FnMut(ServerEvent)) {
    let bytes = std::mem::take(&mut parser.line);
    let is_first = !std::mem::replace(&mut parser.is_begun, true);
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).filter(|_| is_first).unwrap_or(&bytes);
    if bytes.is_empty() {
        parser.id.clone_into(&mut parser.last_event_id);
        let mut event = std::mem::take(&mut parser.event);
        // Without data there is no event.
        if event.data.pop().is_some() {
            complete(event);
        }
        return;
    }
    let line = String::from_utf8_lossy(bytes);
    match line.split_once(':') {
        // A comment, such as a heartbeat.
        Some(("", _)) => {}
        Some((field, value)) => parser.set(field, value.strip_prefix(' ').unwrap_or(value)),
        None => parser.set(&line, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The events in some pieces, as `name=data`.
    fn events(parser: &mut Parser, pieces: &[&[u8]]) -> Vec<String> {
        let mut found = Vec::new();
        for piece in pieces {
            let each = |event: ServerEvent| found.push(format!("{}={}", event.name, event.data));
            parser.read(piece, each).unwrap();
        }
        found
    }

    #[test]
    fn pieces_may_end_anywhere() {
        let text = "retry: 1000\nid: 1-7\nevent: held\ndata: {\"name\":\"é\"}\n\n:\n\
                    event: end\ndata: x\n\n";
        let whole = events(&mut Parser::default(), &[text.as_bytes()]);
        assert_eq!(whole, ["held={\"name\":\"é\"}", "end=x"]);
        for length in 1..text.len() {
            let pieces: Vec<_> = text.as_bytes().chunks(length).collect();
            let mut parser = Parser::default();
            assert_eq!(events(&mut parser, &pieces), whole, "pieces of {length}");
            assert_eq!(parser.last_event_id(), "1-7");
            assert_eq!(parser.retry(), Some(Duration::from_secs(1)));
        }
    }

    #[test]
    fn lines_end_in_all_three_ways() {
        let text = "event: a\r\ndata: 1\r\n\r\nevent: b\rdata: 2\r\revent: c\ndata: 3\n\n";
        for length in 1..=text.len() {
            let pieces: Vec<_> = text.as_bytes().chunks(length).collect();
            let found = events(&mut Parser::default(), &pieces);
            assert_eq!(found, ["a=1", "b=2", "c=3"], "pieces of {length}");
        }
        let parts: [&[u8]; 4] = [b"data: 1\r", b"", b"\n\r", b"\n"];
        assert_eq!(events(&mut Parser::default(), &parts), ["=1"]);
    }

    #[test]
    fn data_of_several_lines_is_joined() {
        let text = b"\xef\xbb\xbfdata: 1\ndata:2\ndata\ndata:  3\n\n";
        assert_eq!(events(&mut Parser::default(), &[text]), ["=1\n2\n\n 3"]);
    }

    #[test]
    fn comments_and_unknown_fields_are_skipped() {
        let text = b":\n\n: text\nevent: a\n:x\nother: 1\nretry: soon\ndata: 1\n\nevent: b\n\n";
        let mut parser = Parser::default();
        assert_eq!(events(&mut parser, &[text]), ["a=1"]);
        assert_eq!(parser.retry(), None);
    }

    #[test]
    fn id_stays_until_another_one_comes() {
        let mut parser = Parser::default();
        events(&mut parser, &[b"id: 1\ndata: a\n\ndata: b\n\nid: 2\0\ndata: c\n\n"]);
        assert_eq!(parser.last_event_id(), "1");
        events(&mut parser, &[b"id: 3\ndata: unfinished\n"]);
        assert_eq!(parser.last_event_id(), "1", "its event has not ended");
        parser.restart();
        assert_eq!(events(&mut parser, &[b"\ndata: d\n\n"]), ["=d"]);
        assert_eq!(parser.last_event_id(), "1");
    }

    #[test]
    fn event_without_end_is_refused() {
        let piece = vec![b'a'; 1024 * 1024];
        let mut parser = Parser::default();
        let refused = (0..=64).map(|_| parser.read(&piece, |_| ())).find(Result::is_err);
        assert_eq!(refused, Some(Err(EventTooLong)));
        let mut parser = Parser::default();
        let line = [b"data: ", &piece[..], b"\n"].concat();
        let refused = (0..=64).map(|_| parser.read(&line, |_| ())).find(Result::is_err);
        assert_eq!(refused, Some(Err(EventTooLong)));
    }
}
