//! Reading single figures out of a gateway's metrics, which are Prometheus text.

/// The sum of all series that begin so: a metric's whole name, with or without all its labels. `None` when there is none.
pub(crate) fn metric(text: &str, series: &str) -> Option<f64> {
    text.lines()
        .filter_map(|line| line.strip_prefix(series))
        .filter(|rest| rest.starts_with([' ', '{']))
        .filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok())
        .reduce(|sum, value| sum + value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_found_by_its_whole_name() {
        let text = "# TYPE redlock_waiters gauge\nredlock_waiters_max 9\nredlock_waiters 12\n\
                    handoffs{kind=\"local\"} 3\nhandoffs{kind=\"remote\"} 4\n";
        assert_eq!(metric(text, "redlock_waiters"), Some(12.0));
        assert_eq!(metric(text, "handoffs"), Some(7.0));
        assert_eq!(metric(text, "handoffs{kind=\"remote\"}"), Some(4.0));
        assert_eq!(metric(text, "redlock"), None);
    }
}
