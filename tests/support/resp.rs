//! A minimal blocking Redis client. It shares no code with the client that the product uses.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use crate::support::harness::PATIENCE;

/// An answer of a Redis server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Resp {
    Text(String),
    Error(String),
    Integer(i64),
    Bytes(Vec<u8>),
    Nil,
    List(Vec<Resp>),
}

impl Resp {
    pub(crate) fn integer(&self) -> i64 {
        match self {
            Self::Integer(number) => *number,
            other => panic!("expected a number, got {other:?}"),
        }
    }

    /// The text of a bulk string.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            other => panic!("expected a text, got {other:?}"),
        }
    }
}

/// A connection of this client.
pub(super) struct Wire(BufReader<TcpStream>);

impl Wire {
    pub(super) fn open(port: u16, password: Option<&str>) -> io::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut wire = Self(BufReader::new(stream));
        if let Some(password) = password {
            wire.call(&["AUTH", password])?;
        }
        Ok(wire)
    }

    pub(super) fn call<A: AsRef<[u8]>>(&mut self, words: &[A]) -> io::Result<Resp> {
        let mut request = format!("*{}\r\n", words.len()).into_bytes();
        for word in words.iter().map(AsRef::as_ref) {
            request.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            request.extend_from_slice(word);
            request.extend_from_slice(b"\r\n");
        }
        self.0.get_mut().write_all(&request)?;
        self.read()
    }

    pub(super) fn read(&mut self) -> io::Result<Resp> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let bad = || io::Error::other(format!("no RESP: {line:?}"));
        let (kind, rest) = line.trim_end().split_at_checked(1).ok_or_else(bad)?;
        let number = || rest.parse::<i64>().map_err(|_| bad());
        Ok(match kind {
            "+" => Resp::Text(rest.into()),
            "-" => Resp::Error(rest.into()),
            ":" => Resp::Integer(number()?),
            "$" => match usize::try_from(number()?) {
                Err(_) => Resp::Nil,
                Ok(len) => {
                    let mut bytes = vec![0; len + 2];
                    self.0.read_exact(&mut bytes)?;
                    bytes.truncate(len);
                    Resp::Bytes(bytes)
                }
            },
            "*" => match usize::try_from(number()?) {
                Err(_) => Resp::Nil,
                Ok(len) => Resp::List((0..len).map(|_| self.read()).collect::<io::Result<_>>()?),
            },
            _ => return Err(bad()),
        })
    }
}
