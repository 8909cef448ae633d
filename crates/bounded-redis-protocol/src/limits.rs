//! Measures a reply before it is parsed. Measuring takes one step for each element, because texts
//! are skipped by their length.

use std::borrow::Cow;

use original::error::{RedisProtocolError, RedisProtocolErrorKind};

/// The limit on the levels of a reply. The deepest expected reply has five levels: that of HELLO,
/// which lists the arguments of modules.
pub const MAX_DEPTH: usize = 8;
/// The limit on the elements of a reply, counted over all levels.
pub const MAX_ELEMENTS: usize = 16 * 1024;
/// The limit on the bytes of a reply.
pub const MAX_BYTES: usize = 8 * 1024 * 1024;
/// The limit on the bytes of a line, and of a reply that contains a map. A map must be small,
/// because the client prints a map that it cannot read.
pub const MAX_SMALL_BYTES: usize = 64 * 1024;
/// The limit on the bytes of a pushed message. The client limits the number of messages in its
/// queue, but not their size.
pub const MAX_PUSH_BYTES: usize = 8 * 1024;

const CRLF: &[u8] = b"\r\n";
const NULL: &[u8] = b"-1";

/// Finds the end of the first reply of a buffer; `None` when the buffer has only a part of it.
///
/// # Errors
/// A reply over a limit is refused as soon as its beginning shows that. Attributes and streamed
/// replies, which Redis never sends, are refused too.
pub(crate) fn end_of_reply(buf: &[u8]) -> Result<Option<usize>, RedisProtocolError> {
    // For each open aggregate (array, set, map or push), the number of elements still to come.
    let mut left = [0; MAX_DEPTH];
    let mut depth = 0;
    let mut elements = 1;
    let mut at = 0;
    let mut max_bytes = MAX_BYTES;
    loop {
        let Some((kind, rest)) = buf.get(at..).and_then(<[u8]>::split_first) else {
            return Ok(None);
        };
        max_bytes = match kind {
            b'%' => max_bytes.min(MAX_SMALL_BYTES),
            b'>' => MAX_PUSH_BYTES,
            _ => max_bytes,
        };
        let is_known = b"+-:_,#($!=*~%>".contains(kind);
        let line = if is_known {
            line(rest)?
        } else {
            return Err(refused(format!(
                "not a Redis server? its reply begins with {:?}",
                char::from(*kind)
            )));
        };
        let Some(line) = line else { return Ok(None) };
        at += 1 + line.len() + CRLF.len();
        let mut children = 0;
        match kind {
            b'$' | b'!' | b'=' if line != NULL => {
                at = at.saturating_add(length(line)?).saturating_add(CRLF.len())
            }
            b'*' | b'~' | b'>' if line != NULL => children = length(line)?,
            b'%' => children = length(line)?.saturating_mul(2),
            _ => {}
        }
        elements = children.saturating_add(elements);
        if elements > MAX_ELEMENTS {
            return Err(refused(format!("a reply has more than {MAX_ELEMENTS} elements")));
        }
        if at > max_bytes {
            return Err(refused(format!("a reply has more than {max_bytes} bytes")));
        }
        if children > 0 {
            let level = left.get_mut(depth);
            *level
                .ok_or_else(|| refused(format!("a reply nests more than {MAX_DEPTH} levels")))? =
                children;
            depth += 1;
            continue;
        }
        // The last element of an aggregate completes it. The complete aggregate is in turn an
        // element of the aggregate around it.
        while depth > 0 {
            left[depth - 1] -= 1;
            if left[depth - 1] > 0 {
                break;
            }
            depth -= 1;
        }
        if depth == 0 {
            return Ok((at <= buf.len()).then_some(at));
        }
    }
}

/// The line at the start of a buffer; `None` when it is incomplete.
fn line(buf: &[u8]) -> Result<Option<&[u8]>, RedisProtocolError> {
    match buf.iter().take(MAX_SMALL_BYTES).position(|byte| *byte == b'\r') {
        Some(end) if buf.len() == end + 1 => Ok(None),
        Some(end) if buf[end + 1] == b'\n' => Ok(Some(&buf[..end])),
        Some(_) => Err(refused("a line has a carriage return inside")),
        None if buf.len() >= MAX_SMALL_BYTES => {
            Err(refused(format!("a line has more than {MAX_SMALL_BYTES} bytes")))
        }
        None => Ok(None),
    }
}

/// Parses a length: digits only, no sign, and no `?` of a streamed reply.
fn length(line: &[u8]) -> Result<usize, RedisProtocolError> {
    let digits = std::str::from_utf8(line)
        .ok()
        .filter(|line| line.bytes().all(|byte| byte.is_ascii_digit()));
    digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| refused("a length is not a number"))
}

pub(crate) fn refused(why: impl Into<Cow<'static, str>>) -> RedisProtocolError {
    RedisProtocolError::new(RedisProtocolErrorKind::DecodeError, why)
}
