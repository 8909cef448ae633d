//! The client's end of a stream of events.

use std::net::SocketAddr;

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

const EVENT_END: &str = "\n\n";

/// One stream.
pub(crate) struct EventStream {
    stream: TcpStream,
    /// What was received, and not yet returned.
    text: String,
}

impl EventStream {
    /// Sends a request for a stream. An empty body is left out.
    pub(crate) async fn open(
        address: SocketAddr,
        method: &str,
        path: &str,
        body: &str,
    ) -> Result<Self, String> {
        let mut stream = TcpStream::connect(address).await.map_err(fault)?;
        stream.set_nodelay(true).map_err(fault)?;
        let mut request =
            format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n");
        if !body.is_empty() {
            let length = body.len();
            request += &format!("content-type: application/json\r\ncontent-length: {length}\r\n");
        }
        request += &format!("\r\n{body}");
        stream.write_all(request.as_bytes()).await.map_err(fault)?;
        Ok(Self { stream, text: String::new() })
    }

    /// Waits for the next event. Returns it with what stands around it in the answer.
    pub(crate) async fn event(&mut self) -> Result<String, String> {
        loop {
            if let Some(event) = self.take_event() {
                return Ok(event);
            }
            self.receive(true).await?;
        }
    }

    /// The next event, if all of it was received.
    pub(crate) fn take_event(&mut self) -> Option<String> {
        let end = self.text.find(EVENT_END)? + EVENT_END.len();
        let rest = self.text.split_off(end);
        Some(std::mem::replace(&mut self.text, rest))
    }

    /// Waits for bytes, and reads once. Returns how many lines ended, without those of the chunked
    /// encoding. With `keeps`, the events can then be taken.
    pub(crate) async fn receive(&mut self, keeps: bool) -> Result<u64, String> {
        self.stream.readable().await.map_err(fault)?;
        // The buffer is not kept while the stream waits: there are thousands of streams.
        let mut buffer = [0; 16 * 1024];
        let received = match self.stream.try_read(&mut buffer) {
            Ok(0) => return Err("the gateway ended a stream".into()),
            Ok(length) => &buffer[..length],
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => &[],
            Err(error) => return Err(fault(error)),
        };
        if keeps {
            self.text.push_str(&String::from_utf8_lossy(received));
        }
        // The lines of the chunked encoding end with a carriage return.
        let ends_line = |pair: &&[u8]| pair[1] == b'\n' && pair[0] != b'\r';
        Ok(received.windows(2).filter(ends_line).count() as u64)
    }
}

fn fault(error: std::io::Error) -> String {
    format!("a stream failed: {error}")
}

/// The number in this field of an answer, or of the data of an event.
pub(crate) fn number(text: &str, field: &str) -> Option<u64> {
    let (_, rest) = text.split_once(&format!("\"{field}\":"))?;
    let end = rest.find(|character: char| !character.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_found_in_answers_and_events() {
        let event = "event: held\ndata: {\"fencing_token\":17,\"validity_ms\":5}\n\n";
        assert_eq!(number(event, "fencing_token"), Some(17));
        assert_eq!(number(event, "validity_ms"), Some(5));
        assert_eq!(number(event, "elapsed_ms"), None);
    }
}
