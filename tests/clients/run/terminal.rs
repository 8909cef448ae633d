//! A command that uses the terminal. The terminal is a pseudo terminal.

use std::process::Stdio;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::binary;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::PATIENCE;

/// A shell on a terminal, with the terminal's input and output.
pub(in crate::clients) struct Screen {
    child: Child,
    shown: String,
}

impl Screen {
    pub(in crate::clients) fn new(gateway: &Gateway, shell: &str, script: &str) -> Self {
        let path = binary().parent().unwrap().to_str().unwrap();
        let mut command = Command::new("script");
        command.args(["-qec", &format!("{shell} '{script}'"), "/dev/null"]);
        command.env("PATH", format!("{path}:{}", std::env::var("PATH").unwrap()));
        command.env("REDLOCK_URL", format!("http://{}", gateway.address())).env("SHELL", "/bin/sh");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        Self { child: command.spawn().expect("script (util-linux) starts"), shown: String::new() }
    }

    pub(in crate::clients) async fn types(&mut self, text: &str) {
        self.child.stdin.as_mut().unwrap().write_all(text.as_bytes()).await.unwrap();
    }

    pub(in crate::clients) async fn shows(&mut self, text: &str) {
        let stdout = self.child.stdout.as_mut().unwrap();
        let read = async {
            while !self.shown.contains(text) {
                let mut buffer = [0; 1024];
                let read = stdout.read(&mut buffer).await.unwrap();
                assert!(read > 0, "the terminal ended without {text:?}: {:?}", self.shown);
                self.shown += &String::from_utf8_lossy(&buffer[..read]);
            }
        };
        let is_shown = timeout(PATIENCE, read).await;
        assert!(is_shown.is_ok(), "no {text:?}: {:?}", self.shown);
    }
}

#[tokio::test]
async fn a_pipeline_that_reads_the_terminal_gets_it() {
    let gateway = Launch::embedded().ready().await;
    // With job control, a pipeline has its own process group. Without job control, it is in the
    // shell's group.
    for shell in ["sh -c", "bash -mc"] {
        let pipeline =
            r#"redlock run b -- sh -c "echo up >&2; head -n1" | sed s/^/got-/; echo and-out"#;
        let mut screen = Screen::new(&gateway, shell, pipeline);
        screen.shows("up").await;
        screen.types("line\n").await;
        screen.shows("got-line").await;
        screen.shows("and-out").await;
    }
}

#[tokio::test]
async fn the_terminal_goes_to_the_process_that_asks_for_it() {
    let gateway = Launch::embedded().ready().await;
    let first =
        r#"read a < /dev/tty; echo first-$a; while [ ! -e /proc/self/none ]; do sleep 0.1; done"#;
    let second = r#"read x; echo $x; read b < /dev/tty; echo second-$b; kill -TERM 0"#;
    let pipeline =
        format!(r#"redlock run b -- sh -c "{first}" | sh -c "{second}""#).replace('$', "\\$");
    let mut screen = Screen::new(&gateway, "bash -mc", &pipeline);
    screen.types("one\n").await;
    screen.shows("first-one").await;
    screen.types("two\n").await;
    screen.shows("second-two").await;
}

#[tokio::test]
async fn a_background_run_that_wants_the_terminal_ends() {
    let gateway = Launch::embedded().ready().await;
    let job = r#"redlock run b -- head -n1 & wait $!; echo code-$?"#;
    let mut screen = Screen::new(&gateway, "bash -mc", job);
    screen.shows("reads a terminal that belongs to another job").await;
    screen.shows("code-143").await;
    assert_eq!(gateway.inspect("b").await["state"], "free");
}
