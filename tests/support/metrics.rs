//! A gateway's metrics, read as Prometheus reads them.

use std::collections::{BTreeMap, BTreeSet};

use crate::support::gateway::Gateway;

/// The samples of one scrape.
pub(crate) struct Samples {
    pub(crate) text: String,
    /// Values, by metric name and labels.
    pub(crate) values: BTreeMap<(String, BTreeSet<(String, String)>), f64>,
}

impl Samples {
    pub(crate) async fn of(gateway: &Gateway) -> Self {
        let answer = gateway.get("/metrics").await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
        Self::parse(answer.text())
    }

    /// Parses the part of the exposition format that the gateway uses. This relies on label values
    /// without quotes.
    fn parse(text: String) -> Self {
        let mut values = BTreeMap::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').expect("a series and a value");
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let labels =
                labels.trim_end_matches('}').split("\",").filter(|label| !label.is_empty());
            let labels = labels
                .map(|label| {
                    let (key, value) = label.split_once("=\"").expect("a label and its value");
                    (key.to_owned(), value.trim_end_matches('"').to_owned())
                })
                .collect();
            let fresh = values
                .insert((name.to_owned(), labels), value.parse().expect("a number"))
                .is_none();
            assert!(fresh, "this sample occurs twice: {line}");
        }
        Self { text, values }
    }

    fn find(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels =
            labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        self.values.get(&(name.to_owned(), labels)).copied()
    }

    #[track_caller]
    pub(crate) fn get(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.find(name, labels)
            .unwrap_or_else(|| panic!("there is no {name} {labels:?} in\n{}", self.text))
    }

    pub(crate) fn is(&self, name: &str, labels: &[(&str, &str)], value: f64) -> bool {
        self.find(name, labels) == Some(value)
    }

    /// All values of a metric that are not zero, by the values of the labels in `key`.
    pub(crate) fn non_zero(&self, name: &str, key: &[&str]) -> BTreeMap<Vec<String>, u64> {
        let mut found = BTreeMap::new();
        for ((_, labels), value) in
            self.values.iter().filter(|((other, _), value)| other == name && **value != 0.0)
        {
            let label = |key: &&str| {
                labels.iter().find(|(k, _)| k == key).map_or("", |(_, value)| value).to_owned()
            };
            *found.entry(key.iter().map(label).collect()).or_default() += *value as u64;
        }
        found
    }
}
