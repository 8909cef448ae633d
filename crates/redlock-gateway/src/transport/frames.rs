//! Counts the frames of an HTTP/2 client that carry no request (RFC 9113, section 4.1).
//!
//! A PING, a SETTINGS or an unknown frame of 9 to 17 bytes costs the gateway as much work as
//! hundreds of bytes of a request, and no queue or limit counts it. So the reader counts frames. A
//! client may send 2,000 at once, 100 more each second, and one more for each 50 bytes that the
//! gateway sends. Beyond that the connection is cut. The library bounds DATA and CONTINUATION frames
//! itself. A HEADERS frame counts too, because the library ignores some of them. A request that
//! begins gives its frame back.
//!
//! This module does not know streams.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

/// The bytes before the first frame of a client (RFC 9113, section 3.4).
const PREFACE: u64 = 24;
const HEAD: usize = 9;
const DATA: u8 = 0;
const CONTINUATION: u8 = 9;
/// Frames that a client may send at once, and per second later. A page that closes 100 streams
/// sends 100.
const FRAMES: u64 = 2_000;
const FRAMES_PER_SECOND: u64 = 100;
/// Bytes that the gateway sends for each further frame of the client. A client sends at most two
/// WINDOW_UPDATE frames for each DATA frame. An event has over 200 bytes, so it earns four frames. The
/// answer to a PING has 17 bytes, so it earns none by itself.
const BYTES_PER_FRAME: u64 = 50;

/// A stream whose reader fails when the client has sent too many frames.
pub(crate) struct CountedFrames<S, F> {
    stream: S,
    parser: Parser,
    budget: Budget,
    /// Requests that have begun, and whose frames were not given back yet.
    begun: Arc<AtomicU64>,
    /// Called before the reader fails.
    exceeded: F,
}

/// Finds the heads of frames.
struct Parser {
    /// Bytes to skip before the next head.
    skip: u64,
    head: [u8; HEAD],
    filled: usize,
}

impl Parser {
    /// Reads bytes. Returns how many frames in them count.
    fn read(&mut self, mut bytes: &[u8]) -> u64 {
        let mut count = 0;
        loop {
            let skipped = self.skip.min(bytes.len() as u64);
            self.skip -= skipped;
            bytes = &bytes[skipped as usize..];
            if bytes.is_empty() {
                return count;
            }
            let taken = bytes.len().min(HEAD - self.filled);
            self.head[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
            self.filled += taken;
            bytes = &bytes[taken..];
            if self.filled == HEAD {
                let [high, middle, low, kind, ..] = self.head;
                self.skip = u64::from(u32::from_be_bytes([0, high, middle, low]));
                self.filled = 0;
                count += u64::from(!matches!(kind, DATA | CONTINUATION));
            }
        }
    }
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
    pub(crate) fn new(stream: S, begun: Arc<AtomicU64>, exceeded: F) -> Self {
        let parser = Parser { skip: PREFACE, head: [0; HEAD], filled: 0 };
        let budget = Budget { frames: FRAMES, sent: 0, refilled: Instant::now() };
        Self { stream, parser, budget, begun, exceeded }
    }
}

impl<S: AsyncRead + Unpin, F: Fn() + Unpin> AsyncRead for CountedFrames<S, F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let count = self.parser.read(&buffer.filled()[before..]);
        let Self { budget, begun, exceeded, .. } = &mut *self;
        if count > 0 && !budget.take(count, begun) {
            exceeded();
            let error = "the client sent too many frames without requests";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error)));
        }
        Poll::Ready(Ok(()))
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
    use super::*;

    const HEADERS: u8 = 1;

    fn frame(kind: u8, length: usize) -> Vec<u8> {
        let head = [&(length as u32).to_be_bytes()[1..], &[kind, 0, 0, 0, 0, 1]].concat();
        [head, vec![0xff; length]].concat()
    }

    #[test]
    fn frames_are_counted_however_they_are_cut() {
        let frames =
            [frame(4, 0), frame(DATA, 300), frame(6, 8), frame(HEADERS, 20), frame(8, 4)].concat();
        let bytes = [[b'P'; PREFACE as usize].as_slice(), &frames].concat();
        for length in [1, 2, 7, 9, 10, 64, bytes.len()] {
            let mut parser = Parser { skip: PREFACE, head: [0; HEAD], filled: 0 };
            let count: u64 = bytes.chunks(length).map(|chunk| parser.read(chunk)).sum();
            assert_eq!(count, 4, "in chunks of {length}");
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
