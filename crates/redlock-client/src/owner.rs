//! The label of a holder that has chosen none.

use rustix::process::getuid;
use rustix::system::uname;

/// The longest label that a gateway accepts.
const MAX_CHARS: usize = 255;

/// The label `user@host:pid command`, as far as they are known. Characters that a gateway refuses
/// are left out.
pub fn default_owner(pid: u32, command: &str) -> String {
    let user = ["USER", "LOGNAME"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|user| !user.is_empty()));
    let user = user.unwrap_or_else(|| format!("uid{}", getuid().as_raw()));
    let host = uname().nodename().to_string_lossy().into_owned();
    bounded(&format!("{user}@{host}:{pid} {command}"))
}

/// The label of this process.
pub(crate) fn of_this_process() -> String {
    let program = std::env::args_os().next().unwrap_or_default();
    let program = std::path::Path::new(&program).file_name().unwrap_or_default();
    default_owner(std::process::id(), &program.to_string_lossy())
}

fn bounded(label: &str) -> String {
    let kept = label.chars().filter(|c| {
        !c.is_control()
            && !matches!(c, '\u{2028}' | '\u{2029}' | '\u{61c}' | '\u{200e}' | '\u{200f}'
                | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    });
    kept.take(MAX_CHARS).collect::<String>().trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_what_a_gateway_accepts() {
        assert_eq!(bounded("a\u{1b}[2J@b\n:1 \u{202e}sh\u{2028} "), "a[2J@b:1 sh");
        assert_eq!(bounded(&"\u{e9}".repeat(300)).chars().count(), MAX_CHARS);
        let label = default_owner(7, "make");
        assert!(label.contains('@') && label.ends_with(":7 make"), "{label}");
    }
}
