use bytes::BytesMut;
use proptest::prelude::*;

use crate::limits::end_of_reply;
use crate::{MAX_BYTES, MAX_DEPTH, MAX_ELEMENTS, MAX_PUSH_BYTES, MAX_SMALL_BYTES, resp2, resp3};

fn refusal(reply: &[u8]) -> String {
    end_of_reply(reply).expect_err("refused").details().to_owned()
}

#[test]
fn a_whole_reply_is_measured_to_its_last_byte() {
    for reply in [
        "+OK\r\n",
        "-ERR no\r\n",
        ":1\r\n",
        "$-1\r\n",
        "*-1\r\n",
        "*0\r\n",
        "$0\r\n\r\n",
        "$3\r\na\r\n\r\n",
        "*2\r\n*1\r\n:1\r\n*0\r\n",
        "*2\r\n$1\r\n0\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n",
        "%1\r\n+a\r\n*1\r\n:1\r\n",
        ">3\r\n+message\r\n+c\r\n+m\r\n",
        "~1\r\n_\r\n",
        "#t\r\n",
        ",1.5\r\n",
        "(12\r\n",
        "=5\r\ntxt:a\r\n",
        "!3\r\nERR\r\n",
    ] {
        let longer = format!("{reply}:7\r\n");
        assert_eq!(end_of_reply(longer.as_bytes()).ok(), Some(Some(reply.len())), "{reply:?}");
        for cut in 0..reply.len() {
            assert_eq!(
                end_of_reply(&reply.as_bytes()[..cut]).ok(),
                Some(None),
                "{reply:?} cut at {cut}"
            );
        }
    }
}

#[test]
fn each_limit_is_inclusive() {
    let nested = |levels: usize| format!("{}:1\r\n", "*1\r\n".repeat(levels));
    assert!(end_of_reply(nested(MAX_DEPTH).as_bytes()).is_ok());
    assert!(refusal(nested(MAX_DEPTH + 1).as_bytes()).contains("8 levels"));
    let array = |elements: usize| format!("*{elements}\r\n");
    assert!(end_of_reply(array(MAX_ELEMENTS - 1).as_bytes()).is_ok());
    assert!(refusal(array(MAX_ELEMENTS).as_bytes()).contains("16384 elements"));
    let in_two = format!("*2\r\n*{}\r\n", MAX_ELEMENTS - 2);
    assert!(refusal(in_two.as_bytes()).contains("16384 elements"));
    let text = |bytes: usize| format!("${bytes}\r\n");
    assert!(end_of_reply(text(MAX_BYTES - 12).as_bytes()).is_ok());
    assert!(refusal(text(MAX_BYTES - 11).as_bytes()).contains("8388608 bytes"));
    let line = |bytes: usize| format!("+{}", "a".repeat(bytes));
    assert!(end_of_reply(line(MAX_SMALL_BYTES - 1).as_bytes()).is_ok());
    assert!(refusal(line(MAX_SMALL_BYTES).as_bytes()).contains("a line has more than 65536"));
    for (small, bytes) in [(">1", MAX_PUSH_BYTES), ("%1", MAX_SMALL_BYTES)] {
        let beginning = format!("{small}\r\n${bytes}\r\n");
        assert!(refusal(beginning.as_bytes()).contains(&format!("more than {bytes} bytes")));
    }
}

#[test]
fn replies_that_redis_never_sends_are_refused() {
    for reply in [
        "$?\r\n", "*?\r\n", "%?\r\n", "~?\r\n", "*-2\r\n", "$-2\r\n", "$+1\r\n", "*1 \r\n",
        "$\r\n", "*1e3\r\n",
    ] {
        assert!(refusal(reply.as_bytes()).contains("not a number"), "{reply:?}");
    }
    for huge in ["18446744073709551615", "9223372036854775807", "99999999999999999999999999"] {
        for kind in ['$', '*', '%', '!', '=', '~', '>'] {
            refusal(format!("{kind}{huge}\r\n").as_bytes());
        }
    }
    for reply in [
        "|1\r\n",
        ";3\r\n",
        ".\r\n",
        "HELLO 3\r\n",
        "HTTP/1.1 400 Bad Request\r\n",
        "\u{15}\u{3}\u{1}",
        "\r\n",
    ] {
        assert!(refusal(reply.as_bytes()).contains("not a Redis server?"), "{reply:?}");
    }
    assert!(refusal(b"+O\rK\r\n").contains("carriage return"));
}

/// The RESP3 parser mistakes a RESP2 null for the beginning of a stream.
#[test]
fn a_streamed_reply_is_refused_at_once() {
    for reply in ["$-1\r\n", "*-1\r\n"] {
        let error = resp3::decode::streaming::decode_bytes_mut(&mut BytesMut::from(reply))
            .expect_err("refused");
        assert_eq!(error.details(), "a streamed reply");
    }
}

#[test]
fn an_unreadable_map_is_printed_alone() {
    let mut reply = BytesMut::from("%1\r\n*0\r\n:1\r\n");
    reply.extend_from_slice(&[b'+'; MAX_SMALL_BYTES]);
    let error =
        resp3::decode::streaming::decode_bytes_mut(&mut reply).expect_err("a key is no array");
    assert!(error.details().len() < 1_000, "{}", error.details().len());
}

#[test]
fn requests_are_encoded_as_strings() {
    use resp2::types::BytesFrame as Older;
    use resp3::types::BytesFrame as Newer;
    let request = "*3\r\n$3\r\nGET\r\n$0\r\n\r\n$3\r\n-12\r\n";
    let mut buf = BytesMut::from("+");
    let words =
        vec![Older::BulkString("GET".into()), Older::BulkString("".into()), Older::Integer(-12)];
    let length =
        resp2::encode::extend_encode(&mut buf, &Older::Array(words), true).expect("a request");
    assert_eq!((&buf[1..], buf.len()), (request.as_bytes(), length));
    let text = |text: &'static str| Newer::BlobString { data: text.into(), attributes: None };
    let words = vec![text("GET"), text(""), Newer::Number { data: -12, attributes: None }];
    let mut buf = BytesMut::from("+");
    let array = Newer::Array { data: words, attributes: None };
    let length = resp3::encode::complete::extend_encode(&mut buf, &array, true).expect("a request");
    assert_eq!((&buf[1..], buf.len()), (request.as_bytes(), length));
}

/// Random bytes, most of which look like parts of a reply.
fn noise() -> impl Strategy<Value = Vec<u8>> {
    const WORDS: &[&str] = &[
        "+", "-", ":", "$", "*", "~", "%", ">", "_", "#t", ",1", "(1", "=", "!", "|", "?", "\r\n",
        "\r\n", "0", "1",
    ];
    let word = prop_oneof![
        4 => proptest::sample::select(WORDS).prop_map(|word| word.as_bytes().to_vec()),
        1 => (0u32..40).prop_map(|number| format!("{number}\r\n").into_bytes()),
        1 => proptest::collection::vec(any::<u8>(), 0..8),
    ];
    proptest::collection::vec(word, 0..40).prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_096))]

    /// The parser needs no more bytes than were measured, and stops at the measured end.
    #[test]
    fn the_parser_takes_the_measured_bytes(bytes in noise()) {
        let measured = end_of_reply(&bytes).ok().flatten();
        let mut older = BytesMut::from(&bytes[..]);
        if let Ok(Some((_, taken, _))) = resp2::decode::decode_bytes_mut(&mut older) {
            prop_assert_eq!(Some(taken), measured);
            prop_assert_eq!(older.len(), bytes.len() - taken);
        }
        let mut newer = BytesMut::from(&bytes[..]);
        if let Ok(Some((_, taken, _))) = resp3::decode::streaming::decode_bytes_mut(&mut newer) {
            prop_assert_eq!(Some(taken), measured);
            prop_assert_eq!(newer.len(), bytes.len() - taken);
        }
    }

    /// An incomplete reply stays in the buffer, and no byte of it is lost.
    #[test]
    fn an_incomplete_reply_stays_in_the_buffer(bytes in noise()) {
        if let Ok(None) = end_of_reply(&bytes) {
            let mut buf = BytesMut::from(&bytes[..]);
            prop_assert!(matches!(resp2::decode::decode_bytes_mut(&mut buf), Ok(None)));
            prop_assert!(matches!(resp3::decode::streaming::decode_bytes_mut(&mut buf), Ok(None)));
            prop_assert_eq!(&buf[..], &bytes[..]);
        }
    }
}
