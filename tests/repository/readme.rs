//! Executes the README's session. A fenced block that is marked `console` has commands after `$ `,
//! and below each command its output. A gateway with embedded nodes takes the place of
//! 127.0.0.1:8080. One shell runs the commands of all blocks. Values that differ from run to run
//! (tokens, dates, ids, milliseconds) are masked in both texts before they are compared.

use std::process::Command;

use crate::support::gateway::{Launch, Scratch, source_root};

const WRITTEN_ADDRESS: &str = "127.0.0.1:8080";
/// Printed after the output of a command, before the number of the next command.
const END: &str = "--8<-- end of command";

#[derive(Debug, PartialEq)]
struct Step {
    command: String,
    output: String,
}

/// The commands of all console blocks, each with the output that stands below it.
fn steps(markdown: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut inside = false;
    let mut continued = false;
    for line in markdown.lines() {
        if line.trim_start().starts_with("```") {
            inside = !inside && line.trim() == "```console";
            continued = false;
        } else if inside {
            let last = steps.last_mut();
            match (line.strip_prefix("$ "), last) {
                (Some(command), _) => {
                    steps.push(Step { command: command.into(), output: String::new() })
                }
                (None, Some(step)) if continued => {
                    step.command.push('\n');
                    step.command.push_str(line);
                }
                (None, Some(step)) => {
                    step.output.push_str(line);
                    step.output.push('\n');
                }
                (None, None) => panic!("a console block begins with output: {line:?}"),
            }
            continued = (continued || line.starts_with("$ ")) && line.ends_with('\\');
        }
    }
    steps
}

/// Runs the commands one after another in one shell. Returns the output of each, including its
/// standard error.
fn run(steps: &[Step]) -> Vec<String> {
    let script: String = steps
        .iter()
        .map(|step| format!("{{ {}\n}} 2>&1\nprintf '\\n{END}\\n'\n", step.command))
        .collect();
    let path = Scratch::new("session.sh", &script);
    let ran =
        Command::new("bash").arg(path.path()).current_dir(env!("CARGO_TARGET_TMPDIR")).output();
    let ran = ran.expect("bash starts");
    let printed = String::from_utf8_lossy(&ran.stdout).replace('\r', "");
    let mut parts: Vec<String> = printed.split(&format!("\n{END}\n")).map(str::to_owned).collect();
    assert_eq!(
        parts.pop().as_deref(),
        Some(""),
        "{printed}\n{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    parts
}

/// Replaces values that differ from run to run.
fn masked(text: &str) -> String {
    let lines: Vec<String> =
        text.trim_end().lines().map(|line| masked_line(line.trim_end())).collect();
    lines.join("\n").trim_end().to_owned()
}

fn masked_line(line: &str) -> String {
    let lower = line.to_ascii_lowercase();
    for header in ["date", "x-request-id", "content-length"] {
        if lower.starts_with(&format!("{header}: ")) {
            return format!("{header}: <{header}>");
        }
    }
    let mut line =
        masked_after(line, "\"request_id\":", |c| c.is_ascii_hexdigit() || c == '"', "<id>");
    for field in ["validity_ms", "elapsed_ms", "expires_in_ms", "retry_after_ms"] {
        line = masked_after(&line, &format!("\"{field}\":"), |c| c.is_ascii_digit(), "<ms>");
    }
    line = masked_after(&line, "may expire in ", |c| c.is_ascii_digit(), "<ms>");
    line = masked_shape(&line, "0000-00-00T00:00:00.000Z", "<time>");
    let owner = "h".repeat(40);
    line = masked_shape(&line, &format!("1.0000000000000000.{owner}"), "<token>");
    masked_shape(&line, "0000000000000000", "<fencing>")
}

/// Replaces the characters of this kind that follow a text, after any spaces.
fn masked_after(line: &str, text: &str, kind: impl Fn(char) -> bool, mask: &str) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some(at) = rest.find(text) {
        let (before, after) = rest.split_at(at + text.len());
        let value = after.trim_start_matches(' ');
        let end = value.find(|c| !kind(c)).unwrap_or(value.len());
        out.push_str(before);
        out.push_str(if end > 0 { mask } else { "" });
        rest = &value[end..];
    }
    out + rest
}

/// Replaces every text of a given shape. In a shape `0` stands for any digit and `h` for any
/// hexadecimal digit. Every other character stands for itself.
fn masked_shape(line: &str, shape: &str, mask: &str) -> String {
    let fits = |text: &[u8]| {
        text.iter().zip(shape.as_bytes()).all(|(found, wanted)| match wanted {
            b'0' => found.is_ascii_digit(),
            b'h' => found.is_ascii_hexdigit(),
            _ => found == wanted,
        })
    };
    let mut out = Vec::new();
    let mut rest = line.as_bytes();
    while !rest.is_empty() {
        if rest.len() >= shape.len() && fits(&rest[..shape.len()]) {
            out.extend_from_slice(mask.as_bytes());
            rest = &rest[shape.len()..];
        } else {
            out.push(rest[0]);
            rest = &rest[1..];
        }
    }
    String::from_utf8(out).expect("whole characters were copied")
}

/// Runs the session in a text. If a command prints something else than the text says, returns an
/// explanation for the first such command.
async fn differs(markdown: &str) -> Option<String> {
    let gateway = Launch::embedded().start().await;
    let steps = steps(&markdown.replace(WRITTEN_ADDRESS, &gateway.address().to_string()));
    assert!(
        !steps.is_empty(),
        "there is no block marked ```console with a line that begins with \"$ \""
    );
    let session: Vec<String> = run(&steps);
    assert_eq!(session.len(), steps.len());
    steps.iter().zip(&session).find_map(|(step, printed)| {
        let written = masked(&step.output);
        let printed = masked(printed);
        (written != printed).then(|| {
            format!("$ {}\nis written to print\n{written}\n\nand prints\n{printed}\n", step.command)
        })
    })
}

#[tokio::test]
async fn the_session_in_the_readme_prints_what_it_says() {
    let path = source_root().join("README.md");
    let markdown = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    if let Some(difference) = differs(&markdown).await {
        panic!("README.md:\n{difference}");
    }
}

const SAMPLE: &str = r#"
Prose, and a block that is not for running:

```sh
$ false
```

```console
$ curl -si -X POST http://127.0.0.1:8080/locks/demo \
    --json '{"ttl_ms": 60000}' | grep -vi '^lock-token'
HTTP/1.1 201 Created
content-type: application/json
cache-control: no-store
location: /locks/demo
content-length: 1
x-request-id: 5f2b7c0e9a3d4418
keep-alive: timeout=74
date: Fri, 21 Nov 2025 11:39:25 GMT

{"name":"demo","token":"1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b","fencing_token":1763725165123456,"ttl_ms":60000,"validity_ms":59397,"elapsed_ms":1,"expires_at":"2025-11-21T11:39:54.822Z","nodes_granted":3,"nodes_total":5}
$ HELD=$(curl -s http://127.0.0.1:8080/locks/demo | grep -o '"state":"[a-z]*"' | head -1)
```

```console
$ echo "$HELD on 127.0.0.1:8080"
"state":"held" on 127.0.0.1:8080
```
"#;

#[test]
fn commands_continue_after_a_backslash_and_the_rest_is_output() {
    let steps = steps(
        "```console\n$ a \\\n  b \\\n  c\nd\n$ not a command\\\n```\n$ e\n```console\n$ f\n```\n",
    );
    let step =
        |command: &str, output: &str| Step { command: command.into(), output: output.into() };
    assert_eq!(
        steps,
        [step("a \\\n  b \\\n  c", "d\n"), step("not a command\\", ""), step("f", "")]
    );
}

#[test]
fn only_unpredictable_values_are_masked() {
    let line = r#"{"token":"1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b","ttl_ms":30000,"validity_ms": 29}"#;
    assert_eq!(masked(line), r#"{"token":"<token>","ttl_ms":30000,"validity_ms":<ms>}"#);
    assert_eq!(masked("Date: today\nLocation: /locks/a\n\n"), "date: <date>\nLocation: /locks/a");
    assert_eq!(masked("it may expire in 21400 ms, größer"), "it may expire in <ms> ms, größer");
    assert_ne!(masked("\"state\":\"held\""), masked("\"state\":\"free\""));
}

#[tokio::test]
async fn a_correct_session_passes_and_a_wrong_one_fails() {
    // The sample shows three votes. The decision may have counted more of them.
    let sample = SAMPLE.replace(
        " | grep -vi '^lock-token'",
        " | grep -vi '^lock-token' | sed 's/\"nodes_granted\":./\"nodes_granted\":3/'",
    );
    assert_eq!(differs(&sample).await, None);
    let wrong = sample.replace("\"state\":\"held\" on", "\"state\":\"free\" on");
    let difference = differs(&wrong).await.expect("a difference");
    assert!(difference.contains("is written to print\n\"state\":\"free\""), "{difference}");
}
