//! Stands in for the crate `redis-protocol` below the Redis client, and adds limits. The original
//! parser recurses once for each level of a reply, and accepts every length that a server names. So
//! this crate measures each reply before it is parsed. A reply over a limit ends the connection,
//! and the parser never sees it.
//!
//! The crate has only the parts of `redis-protocol` 6.0.0 that the Redis client uses. The workspace
//! patches the registry's 6.x by this crate, and Cargo accepts no second 6.x beside a patch. So
//! this crate re-exports the parts of 5.0.1. The decoders of 5.0.1 and 6.0.0 are equal. 6.0.0
//! changed the encoders, so the encoder for requests is written here.

mod limits;

pub use original::{error, redis_keyslot, types};

pub use self::limits::{MAX_BYTES, MAX_DEPTH, MAX_ELEMENTS, MAX_PUSH_BYTES, MAX_SMALL_BYTES};

/// RESP2.
pub mod resp2 {
    pub use original::resp2::types;

    /// Replies.
    pub mod decode {
        use bytes::{Bytes, BytesMut};
        use original::error::RedisProtocolError;
        use original::resp2::types::BytesFrame;

        /// Takes the first reply out of a buffer; `None` when the buffer has only a part of one.
        pub fn decode_bytes_mut(
            buf: &mut BytesMut,
        ) -> Result<Option<(BytesFrame, usize, Bytes)>, RedisProtocolError> {
            if crate::limits::end_of_reply(buf)?.is_none() {
                return Ok(None);
            }
            // The parser must not wait for more bytes than were measured.
            original::resp2::decode::decode_bytes_mut(buf)?
                .map(Some)
                .ok_or_else(|| crate::limits::refused("half a reply"))
        }
    }

    /// Requests.
    pub mod encode {
        use bytes::BytesMut;
        use original::error::RedisProtocolError;
        use original::resp2::types::BytesFrame;

        use crate::requests::{put_length, put_text};

        /// Appends a frame and returns the buffer's length. With `int_as_bulkstring`, numbers
        /// become bulk strings, as servers expect in requests.
        pub fn extend_encode(
            buf: &mut BytesMut,
            frame: &BytesFrame,
            int_as_bulkstring: bool,
        ) -> Result<usize, RedisProtocolError> {
            match frame {
                BytesFrame::Array(words) => {
                    put_length(buf, b'*', words.len());
                    for word in words {
                        extend_encode(buf, word, int_as_bulkstring)?;
                    }
                }
                BytesFrame::BulkString(text) => put_text(buf, text),
                BytesFrame::Integer(number) if int_as_bulkstring => {
                    put_text(buf, number.to_string().as_bytes())
                }
                other => drop(original::resp2::encode::extend_encode(buf, other)?),
            }
            Ok(buf.len())
        }
    }
}

/// RESP3.
pub mod resp3 {
    pub use original::resp3::types;

    /// Replies.
    pub mod decode {
        /// This module has the name that the Redis client expects. Streamed replies, which Redis
        /// never sends, are refused: the client would gather their parts without a limit.
        pub mod streaming {
            use bytes::{Bytes, BytesMut};
            use original::error::RedisProtocolError;
            use original::resp3::types::{BytesFrame, DecodedFrame};

            /// Takes the first reply of a buffer; `None` when the buffer has only a part of one.
            pub fn decode_bytes_mut(
                buf: &mut BytesMut,
            ) -> Result<Option<(DecodedFrame<BytesFrame>, usize, Bytes)>, RedisProtocolError>
            {
                let Some(end) = crate::limits::end_of_reply(buf)? else { return Ok(None) };
                // The reply is split off, because the parser's errors print all of their input,
                // which must not include later replies.
                let mut reply = buf.split_to(end);
                match original::resp3::decode::streaming::decode_bytes_mut(&mut reply)? {
                    Some(whole @ (DecodedFrame::Complete(_), ..)) if reply.is_empty() => {
                        Ok(Some(whole))
                    }
                    _ => Err(crate::limits::refused("a streamed reply")),
                }
            }
        }
    }

    /// Requests.
    pub mod encode {
        /// This module has the name that the Redis client expects.
        pub mod complete {
            use bytes::BytesMut;
            use original::error::RedisProtocolError;
            use original::resp3::types::BytesFrame;

            use crate::requests::{put_length, put_text};

            /// Appends a frame and returns the buffer's length. With `int_as_blobstring`, numbers
            /// become blob strings, as servers expect in requests.
            pub fn extend_encode(
                buf: &mut BytesMut,
                frame: &BytesFrame,
                int_as_blobstring: bool,
            ) -> Result<usize, RedisProtocolError> {
                match frame {
                    BytesFrame::Array { data, attributes: None } => {
                        put_length(buf, b'*', data.len());
                        for word in data {
                            extend_encode(buf, word, int_as_blobstring)?;
                        }
                    }
                    BytesFrame::BlobString { data, attributes: None } => put_text(buf, data),
                    BytesFrame::Number { data, attributes: None } if int_as_blobstring => {
                        put_text(buf, data.to_string().as_bytes());
                    }
                    other => drop(original::resp3::encode::complete::extend_encode(buf, other)?),
                }
                Ok(buf.len())
            }
        }
    }
}

mod requests {
    use bytes::BytesMut;

    const CRLF: &[u8] = b"\r\n";

    pub(crate) fn put_length(buf: &mut BytesMut, kind: u8, length: usize) {
        buf.extend_from_slice(&[kind]);
        buf.extend_from_slice(length.to_string().as_bytes());
        buf.extend_from_slice(CRLF);
    }

    pub(crate) fn put_text(buf: &mut BytesMut, text: &[u8]) {
        put_length(buf, b'$', text.len());
        buf.extend_from_slice(text);
        buf.extend_from_slice(CRLF);
    }
}

#[cfg(test)]
mod tests;
