//! Executes the recipes page. A block is found by its heading and language, and runs as it is on
//! the page. Only the values that [`Place::put`] replaces differ: the gateway's address, and the
//! directory of the programs that the recipes call.

mod ci;
mod databases;
mod jobs;
mod services;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Output, Stdio};

use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::support::gateway::{Gateway, Launch, built, source_root};
use crate::support::harness::{PATIENCE, RedisServer, TempDir, dies_with_us, eventually, masters};

/// The test that runs each recipe. `None` if the page says that no test runs the recipe.
const RUN: &[(&str, Option<&str>)] = &[
    ("A shell script with curl only", Some("jobs::runs_of_a_curl_script")),
    ("Cron on several hosts", Some("jobs::a_crontab")),
    ("A systemd timer on several hosts", Some("jobs::a_systemd_unit")),
    ("GitHub Actions", Some("ci::github_steps")),
    ("GitLab CI", Some("ci::a_gitlab_script")),
    ("Only the newest build deploys", Some("jobs::only_the_newest_build_deploys")),
    ("CI runners on a pool", Some("jobs::at_most_four_places")),
    ("A deployment that needs two environments", Some("jobs::a_deployment_of_two")),
    ("A webhook that is delivered twice", Some("services::a_repeated_delivery")),
    (
        "A service that is called when its lock is ready",
        Some("services::a_service_that_is_called_back"),
    ),
    ("An Ansible playbook", Some("ci::an_ansible_playbook")),
    ("A Kubernetes CronJob", None),
    ("Leader election in Kubernetes", None),
    ("PostgreSQL refuses a late writer", Some("databases::databases_refuse")),
    ("AI agents that claim their work", Some("services::agents_that_claim")),
    ("Terraform without a lock of its own", Some("ci::terraform")),
    ("Readers and a writer", Some("jobs::readers_and_writers")),
];

fn page() -> String {
    let path = source_root().join("crates/redlock-gateway/docs/recipes.md");
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The heading of each recipe, with the text below it.
fn recipes(page: &str) -> Vec<(&str, &str)> {
    page.split("\n## ")
        .skip(1)
        .map(|recipe| recipe.split_once('\n').expect("a recipe has text"))
        .collect()
}

/// The blocks of one recipe that are in one language.
fn blocks(page: &str, heading: &str, language: &str) -> Vec<String> {
    let recipes = recipes(page);
    let (_, text) = recipes
        .iter()
        .find(|(title, _)| *title == heading)
        .unwrap_or_else(|| panic!("no {heading:?}"));
    let fenced = text.split("\n```").skip(1).step_by(2);
    let found =
        fenced.filter_map(|block| block.split_once('\n').filter(|(name, _)| *name == language));
    found.map(|(_, block)| format!("{block}\n")).collect()
}

#[test]
fn every_recipe_marked_as_run_is_run() {
    let page = page();
    let headings: Vec<_> = recipes(&page).into_iter().map(|(heading, _)| heading).collect();
    assert_eq!(headings, RUN.iter().map(|(heading, _)| *heading).collect::<Vec<_>>());
    for ((heading, text), (_, test)) in recipes(&page).into_iter().zip(RUN) {
        let first = text.lines().next().unwrap_or_default();
        let statement =
            first.strip_prefix('*').and_then(|rest| rest.strip_suffix(".*")).unwrap_or_default();
        let is_run =
            statement == "Run by the tests" || statement.starts_with("Run by the tests where ");
        assert!(
            is_run || statement.starts_with("Not run by the tests: needs "),
            "{heading}: {first}"
        );
        assert_eq!(is_run, test.is_some(), "{heading}: {first}");
        let Some((module, function)) = test.and_then(|test| test.split_once("::")) else {
            continue;
        };
        let source = source_root().join(format!("tests/clients/recipes/{module}.rs"));
        let source = std::fs::read_to_string(source).expect("its module");
        assert!(
            source.contains(&format!("#[tokio::test]\nasync fn {function}")),
            "{heading}: no test {function}"
        );
    }
}

/// The work that recipes run. It logs its beginning, waits while a file named `hold` exists, and
/// logs its end.
const WORK: &str = r#"#!/bin/sh
cd "DIR"
echo "begin $$ ${0##*/}" >> log
n=0
while [ -e hold ] && [ $n -lt 60000 ]; do n=$((n + 1)); sleep 0.02; done
sleep 0.05
echo "end $$ ${0##*/}" >> log
[ ! -e code ] || exit "$(cat code)"
"#;

/// The environment of one recipe: a gateway over masters, and a directory with the programs that
/// the recipe calls.
struct Place {
    dir: TempDir,
    gateway: Gateway,
    _servers: Vec<RedisServer>,
}

impl Place {
    async fn new(works: &[&str]) -> Self {
        let servers = masters(3);
        let gateway = Launch::over(&servers).flag("--node-timeout", "6s").ready().await;
        Self::with(servers, gateway, works)
    }

    fn with(servers: Vec<RedisServer>, gateway: Gateway, works: &[&str]) -> Self {
        let place = Self { dir: TempDir::new(), gateway, _servers: servers };
        std::fs::create_dir(place.path("bin")).expect("a fresh directory");
        let redlock = built(&[]).join("redlock");
        std::os::unix::fs::symlink(redlock, place.path("bin/redlock")).expect("a fresh directory");
        for work in works {
            place.program(&format!("bin/{work}"), &WORK.replace("DIR", &place.path("")));
        }
        place
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().expect("a plain path").to_owned()
    }

    fn file(&self, name: &str, content: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, content).expect("the directory can be written");
        path
    }

    /// Writes a script that can be run. `install` writes it, because this process must never have it
    /// open for writing: a process that another test starts at that moment inherits the open file,
    /// and the kernel refuses to run a file that anybody has open for writing.
    fn program(&self, name: &str, content: &str) -> String {
        let path = self.path(name);
        let mut writer = std::process::Command::new("install")
            .args(["-m", "755", "/dev/stdin", &path])
            .stdin(Stdio::piped())
            .spawn()
            .expect("install starts");
        let mut stdin = writer.stdin.take().expect("a pipe");
        stdin.write_all(content.as_bytes()).expect("install reads");
        drop(stdin);
        assert!(writer.wait().expect("install ends").success(), "{path}");
        path
    }

    /// A block of the page, in which the addresses of this place have been put.
    fn block(&self, heading: &str, language: &str, number: usize) -> String {
        let block = blocks(&page(), heading, language).into_iter().nth(number);
        self.put(&block.unwrap_or_else(|| panic!("{heading}: no block {number} in {language}")))
    }

    fn put(&self, text: &str) -> String {
        let address = self.gateway.address().to_string();
        let text = text
            .replace("127.0.0.1:8080", &address)
            .replace("redlock-gateway.redlock:8080", &address);
        text.replace("/usr/bin/redlock", &self.path("bin/redlock"))
            .replace("/usr/local/bin", &self.path("bin"))
    }

    fn search_path(&self) -> String {
        format!("{}:{}", self.path("bin"), std::env::var("PATH").unwrap_or_default())
    }

    /// A command that runs in this place. Its process dies with the test.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = dies_with_us(words[0]);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("REDLOCK_")) {
            command.env_remove(name);
        }
        command
            .env("PATH", self.search_path())
            .env("REDLOCK_URL", format!("http://{}", self.gateway.address()));
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONUNBUFFERED", "1");
        command.args(&words[1..]).current_dir(self.dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut command = Command::from(command);
        command.kill_on_drop(true);
        command
    }

    /// What the work has logged so far. Each line is a list of words.
    fn log(&self) -> Vec<Vec<String>> {
        let log = std::fs::read_to_string(self.path("log")).unwrap_or_default();
        log.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
    }

    fn count(&self, word: &str) -> usize {
        self.log().iter().filter(|line| line[0] == word).count()
    }

    /// The work that is started from now on does not end until [`Self::go`].
    fn hold(&self) {
        self.file("hold", "");
    }

    fn go(&self) {
        std::fs::remove_file(self.path("hold")).expect("the lock is held");
    }

    async fn begun(&self, count: usize) {
        eventually("the work begins", async || (self.count("begin") >= count).then_some(())).await;
    }

    /// Checks that the work has run `runs` times, and that no two runs overlapped.
    fn assert_one_at_a_time(&self, runs: usize) {
        let log = self.log();
        assert_eq!(log.len(), 2 * runs, "{log:?}");
        for pair in log.chunks(2) {
            assert!(
                pair[0][0] == "begin" && pair[1][0] == "end" && pair[0][1] == pair[1][1],
                "two at once: {log:?}"
            );
        }
    }

    /// Checks that a lock is free. Its last holder has ended, and released the lock before that.
    async fn assert_free(&self, name: &str) {
        assert_eq!(self.gateway.inspect(name).await["state"], "free", "{name}");
    }
}

/// The exit code and the output of a process.
async fn ended(child: Child) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } =
        timeout(PATIENCE, child.wait_with_output()).await.expect("the process ends").unwrap();
    (
        status.code(),
        format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)),
    )
}

async fn run(mut command: Command) -> (Option<i32>, String) {
    ended(command.spawn().expect("setpriv (util-linux) starts")).await
}

/// Starts `count` copies of a command at the same time. Each of them must exit with 0.
async fn together(count: usize, command: impl Fn() -> Command) {
    let children: Vec<Child> =
        (0..count).map(|_| command().spawn().expect("setpriv (util-linux) starts")).collect();
    for child in children {
        let (code, output) = ended(child).await;
        assert_eq!(code, Some(0), "{output}");
    }
}

/// Whether a program is installed. Prints a message if not.
async fn is_here(place: &Place, words: &[&str]) -> bool {
    let (code, output) = run(place.command(words)).await;
    if code != Some(0) {
        println!("NOT RUN, because the program is missing: {}: {output}", words[0]);
    }
    code == Some(0)
}

/// The value in a YAML text at a path of keys and numbers, as JSON.
async fn yaml(place: &Place, text: &str) -> serde_json::Value {
    let path: PathBuf = place.file("parsed.yml", text).into();
    let read = "import json, sys, yaml; print(json.dumps(yaml.safe_load(open(sys.argv[1]))))";
    let (code, output) =
        run(place.command(&["python3", "-c", read, path.to_str().expect("plain")])).await;
    assert_eq!(code, Some(0), "python3-yaml parses the block: {output}");
    serde_json::from_str(&output).unwrap_or_else(|error| panic!("{error}: {output}"))
}
