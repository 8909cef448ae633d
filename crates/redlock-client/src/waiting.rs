//! What a waiting acquire reports: its place in line, and who holds the lock.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

/// The state of an acquire that waits, as of the gateway's last answer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// The name of the lock.
    pub name: String,
    /// The place in the gateway's line; 1 is next. `None` if the gateway does not tell.
    pub position: Option<u64>,
    /// The holder's label.
    pub holder: Option<String>,
    /// Since when the holder has the lock, RFC 3339.
    pub acquired_at: Option<String>,
    /// The URL of the gateway that has this acquire in its line.
    pub gateway: String,
    /// What went wrong since the last answer: the place in line was lost, or no gateway decides.
    pub trouble: Option<String>,
}

/// One line for people, without the name of the lock.
impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(trouble) = &self.trouble {
            return f.write_str(trouble);
        }
        match self.position {
            Some(position) => write!(f, "{} in line", ordinal(position))?,
            None => f.write_str("waiting")?,
        }
        match &self.holder {
            Some(label) => write!(f, ", held by {label:?}")?,
            None => f.write_str(", held by somebody")?,
        }
        match &self.acquired_at {
            Some(at) => write!(f, " since {}", time_of(at)),
            None => Ok(()),
        }
    }
}

/// A function that is called with each [`Waiting`].
#[derive(Clone)]
pub(crate) struct Callback(Arc<dyn Fn(&Waiting) + Send + Sync>);

impl fmt::Debug for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Callback")
    }
}

impl Callback {
    pub(crate) fn new(callback: impl Fn(&Waiting) + Send + Sync + 'static) -> Self {
        Self(Arc::new(callback))
    }

    pub(crate) fn call(&self, waiting: &Waiting) {
        (self.0)(waiting);
    }
}

/// `1st`, `2nd`, `3rd`, `11th`.
pub(crate) fn ordinal(number: u64) -> String {
    let ending = match (number % 10, number % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{number}{ending}")
}

/// A moment (RFC 3339) for people: the time of day, and the date unless that is today.
pub(crate) fn time_of(moment: &str) -> String {
    let today = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    match moment.trim_end_matches('Z').split_once('T') {
        Some((date, time)) if moment.ends_with('Z') => {
            let time = time.split('.').next().unwrap_or(time);
            match today.starts_with(date) {
                true => format!("{time} UTC"),
                false => format!("{date} {time} UTC"),
            }
        }
        _ => moment.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinals_end_as_in_english() {
        let shown = [1, 2, 3, 4, 11, 12, 13, 21, 22, 101, 111, 112].map(ordinal).join(" ");
        assert_eq!(shown, "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 101st 111th 112th");
    }

    #[test]
    fn times_of_other_days_have_a_date() {
        let today = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let today = format!("{}T12:03:11.250Z", &today[..10]);
        assert_eq!(time_of(&today), "12:03:11 UTC");
        assert_eq!(time_of("2020-01-02T03:04:05Z"), "2020-01-02 03:04:05 UTC");
        assert_eq!(time_of("yesterday"), "yesterday");
    }
}
