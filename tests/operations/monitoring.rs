//! Alerts and dashboards. They use only metrics that exist, and they show data once a Prometheus
//! scrapes a gateway.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use http::Method;
use serde_json::{Value, json};

use crate::support::certificates::Authority;
use crate::support::gateway::{Gateway, Launch, source_root};
use crate::support::harness::{TempDir, dies_with_us, eventually, free_port, masters};

fn promtool(words: &[&str]) -> String {
    let ran = Command::new("promtool")
        .args(words)
        .current_dir(source_root().join("k8s/monitoring"))
        .output();
    let ran = ran.expect("promtool (prometheus) is installed");
    let printed =
        format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "promtool {words:?}:\n{printed}");
    printed
}

#[test]
fn alerts_fire_exactly_when_they_should() {
    assert!(promtool(&["check", "rules", "alerts.yaml"]).contains("28 rules found"));
    assert!(promtool(&["test", "rules", "alerts.test.yaml"]).contains("SUCCESS"));
    let (rules, tests) = ["alerts.yaml", "alerts.test.yaml"].map(read).into();
    for alert in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        assert!(tests.contains(&format!("alertname: {alert}")), "{alert} has no scenario");
    }
}

fn read(name: &str) -> String {
    std::fs::read_to_string(source_root().join("k8s/monitoring").join(name))
        .expect("the address is listed")
}

#[test]
fn every_alert_links_to_a_section_of_the_runbook() {
    let page = source_root().join("crates/redlock-gateway/docs/symptoms.md");
    let page = std::fs::read_to_string(page).expect("the address is listed");
    let anchors: Vec<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("##"))
        .map(|title| {
            title
                .trim_start_matches('#')
                .trim()
                .to_lowercase()
                .replace([':', ','], "")
                .replace(' ', "-")
        })
        .collect();
    let rules = read("alerts.yaml");
    let runbooks: Vec<_> = rules
        .lines()
        .filter_map(|line| line.split_once("/docs/symptoms#").map(|(_, anchor)| anchor))
        .map(|anchor| anchor.trim_end_matches('\''))
        .collect();
    assert_eq!(runbooks.len(), rules.matches("- alert: ").count());
    for anchor in runbooks {
        assert!(anchors.iter().any(|known| known == anchor), "{anchor} is not one of {anchors:?}");
    }
}

/// A Prometheus that has the alerts and scrapes one gateway.
struct Prometheus {
    address: SocketAddr,
    process: Child,
    _dir: TempDir,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Prometheus {
    fn start(scraped: SocketAddr) -> Self {
        let dir = TempDir::new();
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let rules = source_root().join("k8s/monitoring/alerts.yaml");
        let config = format!(
            "global: {{ scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 250ms }}\n\
             rule_files: [{rules:?}]\n\
             scrape_configs:\n- job_name: redlock-gateway\n  static_configs: [{{ targets: [\"{scraped}\"] }}]\n"
        );
        let file = dir.path().join("prometheus.yml");
        std::fs::write(&file, config).expect("a file");
        let mut command = dies_with_us("prometheus");
        command.arg(format!("--config.file={}", file.display()));
        command.arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()));
        command.arg(format!("--web.listen-address={address}")).stdin(Stdio::null());
        let process =
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("prometheus starts");
        Self { address, process, _dir: dir }
    }

    async fn ask(&self, gateway: &Gateway, path: &str) -> Option<Value> {
        let answer = gateway.call(Method::GET, path).to(self.address).try_send().await.ok()?;
        (answer.status == 200).then(|| answer.json()["data"].take())
    }

    /// The number of series that the query returns.
    async fn series(&self, gateway: &Gateway, query: &str) -> Option<usize> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let data = self.ask(gateway, &format!("/api/v1/query?query={encoded}")).await?;
        Some(data["result"].as_array()?.len())
    }
}

/// The queries of the dashboard, with all jobs and gateways selected.
fn queries_of_the_dashboard() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&read("dashboard.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let queries = targets.map(|target| target["expr"].as_str().expect("a query"));
    queries.map(|query| query.replace("$job", ".*").replace("$instance", ".*")).collect()
}

/// The metrics that the rules use.
fn metrics_of_the_rules() -> BTreeSet<String> {
    let rules = read("alerts.yaml");
    let words = rules.split(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '_' | ':'));
    let is_metric = |word: &&str| word.starts_with("redlock_") || word.starts_with("redlock:");
    words.filter(is_metric).map(str::to_owned).collect()
}

#[tokio::test]
async fn every_query_finds_data_in_a_real_prometheus() {
    let admin = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let authority = Authority::new();
    let own = authority.issue("server", "/CN=gateway");
    let servers = masters(3);
    // The gateway reports the expiry of a certificate only if its public address uses TLS.
    let launch =
        Launch::over(&servers).flag("--admin-listen", &admin.to_string()).flag("--group", "all=*");
    let launch = launch.flag("--public-url", "https://locks.example.com");
    let gateway = launch.flag("--tls-cert", &own.cert).flag("--tls-key", &own.key).start().await;
    let prometheus = Prometheus::start(admin);
    for query in queries_of_the_dashboard().into_iter().chain(metrics_of_the_rules()) {
        eventually(&format!("{query} finds something"), async || {
            // These requests give the histograms some values.
            gateway.call(Method::GET, "/livez").to(admin).try_send().await.ok()?;
            prometheus.series(&gateway, &query).await.filter(|series| *series > 0)
        })
        .await;
    }
    let rules = eventually("every rule was evaluated", async || {
        let rules = prometheus.ask(&gateway, "/api/v1/rules").await?;
        let groups = rules["groups"].as_array().expect("groups").iter();
        let rules = groups.flat_map(|group| group["rules"].as_array().expect("rules"));
        let rules: Vec<_> = rules.cloned().collect();
        rules.iter().all(|rule| rule["health"] != "unknown").then_some(rules)
    })
    .await;
    assert_eq!(rules.len(), 28);
    for rule in rules {
        assert_eq!((&rule["health"], &rule["lastError"]), (&json!("ok"), &Value::Null), "{rule:#}");
    }
}
