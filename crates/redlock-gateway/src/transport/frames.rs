//! Counts the frames of an HTTP/2 client that carry no request (RFC 9113, section 4.1).
//!
//! A PING, a SETTINGS or an unknown frame of 9 to 17 bytes costs the gateway as much work as
//! hundreds of bytes of a request, and no queue or limit counts it. So the reader counts frames. A
//! client may send 2,000 at once, 100 more each second, and one more for each 50 bytes that the
//! gateway sends. Beyond that the connection is cut. The library bounds DATA and CONTINUATION frames
//! itself. A HEADERS frame counts too, because the library ignores some of them. A request that
//! begins gives its frame back.
//!
//! The library decodes a header block while its frames arrive, and keeps both the fields and the
//! frames. A client that never ended its block could take 235 kB (measured). So the reader holds
//! the frames of a block until the last one has arrived. A block of more than 17 KiB ends the
//! connection; a trusted proxy may send more.
//!
//! The library stores an entry of the header table as a slice of its read buffer. Each entry can
//! keep a buffer of 16 KiB alive: 430 kB were measured for one connection. So the gateway announces
//! a table of size 0. After the client acknowledges that size, [`CountedFrames`] inserts a size
//! update (RFC 7541, section 6.3) into the next header block. The update empties the table. Before
//! the acknowledgement, [`CountedFrames`] limits the bytes that the entries keep.
//!
//! This module does not know streams.

mod fields;
mod held;
mod kept;
mod parser;

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use self::held::Held;
pub(crate) use self::kept::TablePool;
use self::parser::{
    BlockError, CONTINUATION, END_HEADERS, FirstBlock, Parsed, Parser, emptying_table,
};
use crate::telemetry::Flood;

/// Frames that a client may send at once, and per second later. A page that closes 100 streams
/// sends 100.
const FRAMES: u64 = 2_000;
const FRAMES_PER_SECOND: u64 = 100;
/// Bytes that the gateway sends for each further frame of the client. A client sends at most two
/// WINDOW_UPDATE frames for each DATA frame. An event has over 200 bytes, so it earns four frames. The
/// answer to a PING has 17 bytes, so it earns none by itself.
const BYTES_PER_FRAME: u64 = 50;

/// Bytes that are read at once while a header block is held.
const CHUNK: usize = 4 * 1024;
/// A CONTINUATION frame that continues nothing. The library answers it with GOAWAY, and closes the
/// connection.
const BREAK: [u8; 9] = [0, 0, 0, CONTINUATION, END_HEADERS, 0, 0, 0, 1];

/// A stream whose reader sees whole header blocks, and fails when the client has sent too many
/// frames.
pub(crate) struct CountedFrames<S, F> {
    stream: S,
    parser: Parser,
    held: Held,
    budget: Budget,
    /// Requests that have begun, and whose frames were not given back yet.
    begun: Arc<AtomicU64>,
    /// Called with the reason, before the connection is ended.
    exceeded: F,
    /// Why the rest of the client's bytes is not read.
    broken: Option<BlockError>,
    /// Whether the library has got the block that empties the header table, or will get it next.
    empties_table: bool,
}

/// How many frames the client may still send.
struct Budget {
    frames: u64,
    /// Sent bytes that are not worth a whole frame yet.
    sent: u64,
    refilled: Instant,
}

impl Budget {
    /// Takes this many frames. Returns whether there were as many. `begun`: the number of requests
    /// that have begun.
    fn take(&mut self, count: u64, begun: &AtomicU64) -> bool {
        if count > self.frames {
            let now = Instant::now();
            let millis = now.duration_since(self.refilled).as_millis() as u64;
            let begun = begun.swap(0, Ordering::Relaxed);
            self.add(millis * FRAMES_PER_SECOND / 1_000 + self.sent / BYTES_PER_FRAME + begun);
            (self.sent, self.refilled) = (0, now);
        }
        let left = self.frames.checked_sub(count);
        self.frames = left.unwrap_or(0);
        left.is_some()
    }

    fn add(&mut self, frames: u64) {
        self.frames = self.frames.saturating_add(frames).min(FRAMES);
    }
}

impl<S, F> CountedFrames<S, F> {
    /// `is_of_proxy`: whether the client is a trusted proxy. `pool`: for entries of header tables.
    pub(crate) fn new(
        stream: S,
        begun: Arc<AtomicU64>,
        (is_of_proxy, pool): (bool, TablePool),
        exceeded: F,
    ) -> Self {
        let budget = Budget { frames: FRAMES, sent: 0, refilled: Instant::now() };
        let (parser, held) = (Parser::new(is_of_proxy, pool), Held::default());
        Self { stream, parser, held, budget, begun, exceeded, broken: None, empties_table: false }
    }
}

impl<S, F: Fn(Flood)> CountedFrames<S, F> {
    /// Counts the frames in these bytes.
    fn count(&mut self, bytes: &[u8]) -> io::Result<Parsed> {
        match self.parser.read(bytes) {
            Ok(parsed) => {
                if parsed.count > 0 && !self.budget.take(parsed.count, &self.begun) {
                    (self.exceeded)(Flood::Frames);
                    let error = "the client sent too many frames without requests";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, error));
                }
                Ok(parsed)
            }
            Err(error) => {
                (self.exceeded)(Flood::Head);
                self.broken = Some(error);
                self.held = Held::default();
                self.held.add(&BREAK, 0, 0);
                Ok(Parsed { count: 0, unfinished: bytes.len(), first_block: None })
            }
        }
    }

    /// Holds bytes, of which `unfinished` are not for the reader yet.
    fn hold(&mut self, bytes: &[u8], unfinished: usize, first_block: Option<FirstBlock>) {
        let (length, ready) = self.held.lengths();
        self.held.add(bytes, unfinished, self.parser.announced());
        if let Some(FirstBlock { at, bytes }) = first_block {
            // A block that began in earlier bytes starts at the first byte that the library must not
            // see.
            let at = at.map_or(ready, |at| length + at);
            self.held.replace(at..at + bytes, emptying_table);
            self.empties_table = true;
        }
    }
}

impl<S: AsyncRead + Unpin, F: Fn(Flood) + Unpin> AsyncRead for CountedFrames<S, F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        // The library reads on only after it has decoded all whole frames.
        if this.empties_table && !this.held.has_ready() {
            this.empties_table = false;
            this.parser.table_is_emptied();
        }
        loop {
            if this.held.show(buffer) || buffer.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            if let Some(error) = this.broken {
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error)));
            }
            if this.held.is_empty() {
                ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
                let bytes = &buffer.filled()[before..];
                let Parsed { unfinished, first_block, .. } = this.count(bytes)?;
                if first_block.is_some() {
                    this.hold(bytes, unfinished, first_block);
                    buffer.set_filled(before);
                    continue;
                }
                let whole = bytes.len() - unfinished;
                if unfinished > 0 && this.broken.is_none() {
                    this.hold(&bytes[whole..], unfinished, None);
                }
                if unfinished == 0 || whole > 0 {
                    buffer.set_filled(before + whole);
                    return Poll::Ready(Ok(()));
                }
                buffer.set_filled(before);
            } else {
                let mut chunk = [0; CHUNK];
                let mut chunk = ReadBuf::new(&mut chunk);
                ready!(Pin::new(&mut this.stream).poll_read(context, &mut chunk))?;
                let bytes = chunk.filled();
                if bytes.is_empty() {
                    return Poll::Ready(Ok(()));
                }
                let Parsed { unfinished, first_block, .. } = this.count(bytes)?;
                if this.broken.is_none() {
                    // If the block has not ended in these bytes, its earlier bytes stay held too.
                    let before = if unfinished == bytes.len() { this.held.unfinished() } else { 0 };
                    this.hold(bytes, before + unfinished, first_block);
                }
            }
        }
    }
}

impl<S: AsyncWrite + Unpin, F: Unpin> AsyncWrite for CountedFrames<S, F> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        self.budget.sent += written as u64;
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, slices))?;
        self.budget.sent += written as u64;
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::io::AsyncReadExt;

    use super::parser::tests::{connection, frame};
    use super::parser::{HEAD, HEADERS, MAX_BLOCK};
    use super::*;

    /// A client that sends one of these chunks at each read.
    struct Client<'a>(std::slice::Chunks<'a, u8>);

    impl AsyncRead for Client<'_> {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            buffer.put_slice(self.0.next().unwrap_or_default());
            Poll::Ready(Ok(()))
        }
    }

    /// What the reader sees of these bytes, why it fails, and the reported reason.
    async fn seen(bytes: &[u8], at_once: usize) -> (Vec<u8>, io::Result<()>, Option<Flood>) {
        let reported = Cell::new(None);
        let client = Client(bytes.chunks(at_once));
        let mut frames =
            CountedFrames::new(client, Arc::default(), (false, TablePool::new(0)), |how| {
                reported.set(Some(how));
            });
        let (mut seen, mut buffer) = (Vec::new(), [0; 64]);
        let end = loop {
            match frames.read(&mut buffer).await {
                Ok(0) => break Ok(()),
                Ok(read) => seen.extend_from_slice(&buffer[..read]),
                Err(error) => break Err(error),
            }
        };
        drop(frames);
        (seen, end, reported.get())
    }

    #[tokio::test]
    async fn the_reader_sees_a_header_block_when_it_is_whole() {
        let head = [frame(HEADERS, 0, 300), frame(CONTINUATION, END_HEADERS, 5_000)].concat();
        let frames = [frame(4, 0, 6), frame(6, 0, 8), head.clone(), frame(0, 0, 100), head];
        let bytes = connection(&frames);
        for at_once in [1, 7, 10, 64] {
            let (whole, end, reported) = seen(&bytes, at_once).await;
            assert!(whole == bytes && end.is_ok() && reported.is_none(), "{at_once} at once");
            let cut = &bytes[..bytes.len() - 1];
            let (part, ..) = seen(cut, at_once).await;
            let before = bytes.len() - frames[4].len();
            assert_eq!(part, bytes[..before], "{at_once} at once");
        }
    }

    #[tokio::test]
    async fn the_first_block_after_an_acknowledgement_empties_the_table() {
        let acknowledgement = frame(4, 1, 0);
        let head =
            |length| [frame(HEADERS, 0, length), frame(CONTINUATION, END_HEADERS, 20)].concat();
        let short = frame(HEADERS, END_HEADERS, 30);
        for (before, first, after) in [
            (vec![frame(0, 0, 50)], short.clone(), vec![]),
            (vec![], head(300), vec![frame(0, 0, 100), short.clone(), short.clone()]),
            (vec![frame(6, 0, 8)], head(16_384), vec![head(40)]),
        ] {
            let (before, after) = (before.concat(), after.concat());
            let first_bytes = connection(std::slice::from_ref(&short));
            let begin = [first_bytes, acknowledgement.clone(), before].concat();
            let bytes = [&begin[..], &first, &after].concat();
            let whole = HEAD + usize::from(u16::from_be_bytes([first[1], first[2]]));
            let emptied = emptying_table(&first[..whole]);
            let wanted = [&begin[..], &emptied, &first[whole..], &after].concat();
            for at_once in [1, 5, 9, 10, 64] {
                let (seen, end, reported) = seen(&bytes, at_once).await;
                assert!(seen == wanted, "{} bytes, {at_once} at once", first.len());
                assert!(end.is_ok() && reported.is_none());
            }
        }
    }

    #[tokio::test]
    async fn a_long_header_block_ends_the_connection() {
        let before = connection(&[frame(4, 0, 0)]);
        let rest = MAX_BLOCK - 16_384 - 2 * 9;
        for (length, is_long) in [(rest, false), (rest + 1, true)] {
            let head = [frame(HEADERS, 0, 16_384), frame(CONTINUATION, END_HEADERS, length)];
            let bytes = [before.as_slice(), &head.concat()].concat();
            for at_once in [9, 64] {
                let (seen, end, reported) = seen(&bytes, at_once).await;
                let expected =
                    if is_long { [&before, BREAK.as_slice()].concat() } else { bytes.clone() };
                assert!(seen == expected, "{length} bytes, {at_once} at once");
                assert_eq!(end.is_err(), is_long);
                assert_eq!(reported, is_long.then_some(Flood::Head));
            }
        }
    }

    #[test]
    fn answers_earn_frames_and_answers_to_pings_do_not_suffice() {
        let budget = || Budget { frames: 0, sent: 0, refilled: Instant::now() };
        let mut client = budget();
        client.sent = 250;
        let none = AtomicU64::new(0);
        assert!(client.take(2, &none), "windows for one event");
        let mut flood = budget();
        flood.sent = 100 * 17;
        assert!(!flood.take(100, &none), "answers to 100 PINGs");
        assert!(budget().take(100, &AtomicU64::new(100)), "the heads of 100 requests");
    }
}
