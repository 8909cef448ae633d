//! Sets of lock names: an exact name, or a pattern with `*` for any text, slashes included.

use redlock_core::LockName;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern(Box<str>);

impl Pattern {
    /// The allowed form of a pattern, for error messages.
    pub const ALLOWED: &str = "expected [A-Za-z0-9._:@/+~-] and * for any text, at most 255 bytes; without * it must be a lock's \
                               name, of which no segment is empty, . or ..";

    /// Returns `None` when no lock name could match.
    pub fn parse(text: &str) -> Option<Self> {
        // A star may stand for no text at all. So a lock name can match only if the text without
        // its stars is empty or may be part of a name.
        let fixed = text.replace('*', "");
        let has_star = text.contains('*');
        let is_part = |text: &str| text.is_empty() || LockName::check_part(text).is_ok();
        let possible = if has_star { is_part(&fixed) } else { text.parse::<LockName>().is_ok() };
        possible.then(|| Self(text.into()))
    }

    pub fn matches(&self, name: &LockName) -> bool {
        let mut parts = self.0.split('*');
        // `split` always yields a first part.
        let Some(mut rest) = name.as_str().strip_prefix(parts.next().unwrap_or_default()) else {
            return false;
        };
        let Some(last) = parts.next_back() else { return rest.is_empty() };
        for part in parts {
            // The leftmost match leaves the most text for the parts that follow.
            match rest.find(part) {
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        rest.ends_with(last)
    }
}

/// A named group of locks that share metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    pub name: String,
    pub locks: Pattern,
}

/// Limit on the number of groups. Each group adds some 50 time series to the metrics. A set of
/// groups is one `u64` with a bit for each group, so at most 64 groups are possible.
pub const MAX_GROUPS: usize = 50;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_text_and_everything_else_for_itself() {
        for (pattern, name, matches) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("a", "b", false),
            ("*", "a/b", true),
            ("deploy/*", "deploy/x", true),
            ("deploy/*", "deploy/x/y", true),
            ("deploy/*", "deploy", false),
            ("deploy/*", "xdeploy/a", false),
            ("*/prod", "a/b/prod", true),
            ("*/prod", "prod", false),
            ("a*b*c", "abc", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("ab*ba", "aba", false),
            ("a**b", "ab", true),
            (".*", "x", false),
            ("[a]", "a", false),
        ] {
            let found = Pattern::parse(pattern)
                .is_some_and(|it| it.matches(&name.parse::<LockName>().unwrap()));
            assert_eq!(found, matches, "{pattern} {name}");
        }
    }

    #[test]
    fn text_that_no_name_can_match_is_refused() {
        let long = "a".repeat(LockName::MAX_LEN + 1);
        for text in ["", "a b", "a?", "{a}", "ä", "a\n", "a/", "a/../b", long.as_str()] {
            assert_eq!(Pattern::parse(text), None, "{text}");
        }
    }
}
