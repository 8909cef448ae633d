//! Recipes for deployments: CI systems, Ansible and Terraform.

use std::path::Path;

use serde_json::Value;
use tokio::process::Command;
use tokio::time::timeout;

use super::{Place, ended, is_here, run, together, yaml};
use crate::http::keys::{HOLDER, Key, file, key};
use crate::support::gateway::{Launch, Scratch};
use crate::support::harness::{PATIENCE, eventually, masters};
use crate::support::waiters::waiting_is;

/// A place whose gateway requires a key. The last value owns the file of keys, which is deleted
/// when the value is dropped.
async fn locked_place() -> (Place, Key, Scratch) {
    let ci = key("ci", HOLDER, "deploy/*").await;
    let keys = file(&[&ci]);
    let servers = masters(3);
    let launch = Launch::over(&servers).flag("--node-timeout", "6s");
    let gateway = launch.flag("--auth-keys", keys.path()).start().await;
    eventually("a majority votes", async || (gateway.readyz().await.status == 200).then_some(()))
        .await;
    (Place::with(servers, gateway, &["deploy-production"]), ci, keys)
}

/// Makes a repository with one commit, and a clone of it as a CI system would. Returns the commit.
async fn cloned(place: &Place) -> String {
    let script = "git init -q -b main origin && git -C origin $ID commit -q --allow-empty -m 1 && git clone -q origin clone";
    commit(place, script).await
}

/// Runs a script that commits to the repository. Returns the newest commit.
async fn commit(place: &Place, script: &str) -> String {
    let identity = "ID='-c user.name=a -c user.email=a@example.org -c commit.gpgsign=false'";
    let script = format!("{identity}; {script} && git -C origin rev-parse HEAD");
    let (code, output) = run(place.command(&["sh", "-c", &script])).await;
    assert_eq!(code, Some(0), "{output}");
    output.trim().to_owned()
}

/// Checks that a job for an older commit deploys nothing. A job whose newest commit cannot be
/// looked up must deploy nothing either.
async fn an_older_commit_stays(place: &Place, job: impl Fn() -> Command) {
    let runs = place.count("begin");
    commit(place, "git -C origin $ID commit -q --allow-empty -m 2").await;
    let (code, output) = run(job()).await;
    assert!(code == Some(0) && output.contains("a newer commit"), "{output}");
    std::fs::rename(place.path("origin"), place.path("away")).unwrap();
    let (code, output) = run(job()).await;
    assert!(code != Some(0), "{output}");
    assert_eq!(place.count("begin"), runs);
}

/// Sets the variables in a YAML mapping. Before that, `put` inserts the values that the CI system
/// provides.
fn set(command: &mut Command, variables: &Value, put: impl Fn(&str) -> String) {
    for (name, value) in variables.as_object().into_iter().flatten() {
        command.env(name, put(value.as_str().expect("text")));
    }
}

#[tokio::test]
async fn github_steps_run_one_deployment_at_a_time() {
    let (place, ci, _keys) = locked_place().await;
    let workflow = yaml(&place, &place.block("GitHub Actions", "yaml", 0)).await;
    let job = &workflow["jobs"]["deploy"];
    let step = job["steps"]
        .as_array()
        .unwrap()
        .iter()
        .find(|step| step["run"].is_string())
        .expect("a step");
    let put = |text: &str| {
        let text = text.replace("${{ secrets.REDLOCK_KEY }}", &ci.text);
        let text =
            text.replace("${{ github.repository }}", "a/b").replace("${{ github.run_id }}", "7");
        assert!(!text.contains("${{"), "{text}");
        text
    };
    let script = place.file("step.sh", &put(step["run"].as_str().unwrap()));
    let newest = cloned(&place).await;
    let runner = |temp: &str| {
        std::fs::create_dir_all(place.path(temp)).unwrap();
        // If `shell` is not set, GitHub's runner uses this command.
        let mut command = place.command(&["bash", "-e", &script]);
        command
            .env_remove("REDLOCK_URL")
            .env("RUNNER_TEMP", place.path(temp))
            .current_dir(place.path("clone"));
        command.env("GITHUB_REF", "refs/heads/main").env("GITHUB_SHA", &newest);
        set(&mut command, &job["env"], put);
        set(&mut command, &step["env"], put);
        command
    };
    place.hold();
    let first = runner("first").spawn().unwrap();
    place.begun(1).await;
    let held = ci.get(&place.gateway, "/locks/deploy/production").await.json();
    assert_eq!(held["owner"], "a/b run 7");
    let others = ["second", "third"].map(|temp| runner(temp).spawn().unwrap());
    place.go();
    for child in [first].into_iter().chain(others) {
        let (code, output) = ended(child).await;
        assert_eq!(code, Some(0), "{output}");
    }
    place.assert_one_at_a_time(3);
    place.file("code", "9");
    assert_eq!(run(runner("first")).await.0, Some(9), "a deployment that fails fails the step");
    an_older_commit_stays(&place, || runner("first")).await;
}

#[tokio::test]
async fn a_gitlab_script_runs_one_deployment_at_a_time() {
    let (place, ci, _keys) = locked_place().await;
    let job = yaml(&place, &place.block("GitLab CI", "yaml", 0)).await["deploy"].clone();
    let lines: Vec<_> =
        job["script"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect();
    let script = place.file("script.sh", &format!("set -eo pipefail\n{}\n", lines.join("\n")));
    let key = place.file("key", &ci.text);
    let put = |text: &str| {
        let text = text.replace("$CI_PROJECT_PATH", "a/b").replace("$CI_JOB_ID", "7");
        assert!(!text.contains('$'), "{text}");
        text
    };
    let newest = cloned(&place).await;
    let runner = || {
        let mut command = place.command(&["bash", &script]);
        command
            .env_remove("REDLOCK_URL")
            .env("REDLOCK_KEY_FILE", &key)
            .current_dir(place.path("clone"));
        command.env("CI_COMMIT_BRANCH", "main").env("CI_COMMIT_SHA", &newest);
        set(&mut command, &job["variables"], put);
        command
    };
    together(3, runner).await;
    place.assert_one_at_a_time(3);
    place.file("code", "9");
    assert_eq!(run(runner()).await.0, Some(9));
    an_older_commit_stays(&place, runner).await;
}

/// The path of Ansible's program. Ansible is installed once, in its own folder below the build
/// directory. `None` if pip cannot install it.
async fn ansible(place: &Place) -> Option<String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ansible");
    let playbook = folder.join("bin/ansible-playbook").to_str()?.to_owned();
    let done = folder.join("installed");
    if !done.exists() {
        let install = r#"rm -rf "$0" && python3 -m venv "$0" && "$0/bin/pip" install -q --disable-pip-version-check \
            --retries 1 'ansible-core>=2.15,<3' && touch "$0/installed""#;
        let mut command = place.command(&["sh", "-c", install, folder.to_str()?]);
        let installed = timeout(PATIENCE, command.output()).await;
        let output = installed
            .as_ref()
            .map(|done| done.as_ref().map(|done| String::from_utf8_lossy(&done.stderr)));
        if !done.exists() {
            println!("NOT RUN, because pip cannot install ansible-core: {output:?}");
            return None;
        }
    }
    Some(playbook)
}

#[tokio::test]
async fn an_ansible_playbook_runs_once_at_a_time() {
    let place = Place::new(&["site-change"]).await;
    let Some(program) = ansible(&place).await else { return };
    let playbook = place.file("site.yml", &place.block("An Ansible playbook", "yaml", 0));
    let play = || {
        let mut command = place.command(&[&program, "-i", "localhost,", "-c", "local", &playbook]);
        command.env("HOME", place.path("")).env("ANSIBLE_HOME", place.path("ansible"));
        command.env("ANSIBLE_REMOTE_TEMP", place.path("remote"));
        // Without this setting, Ansible looks for the newest Python on the path, and that may be a
        // shim.
        let python = program.replace("ansible-playbook", "python3");
        command
            .env("ANSIBLE_PYTHON_INTERPRETER", python)
            .env("USER", "root")
            .env("LC_ALL", "C.UTF-8");
        command
    };
    place.hold();
    let first = play().spawn().unwrap();
    place.begun(1).await;
    assert_eq!(place.gateway.inspect("ansible/site").await["owner"], "ansible of root");
    let second = play().spawn().unwrap();
    waiting_is(&place.gateway, 1, 1).await;
    place.go();
    for child in [first, second] {
        let (code, output) = ended(child).await;
        assert_eq!(code, Some(0), "{output}");
    }
    place.assert_one_at_a_time(2);
    place.file("code", "1");
    assert_ne!(run(play()).await.0, Some(0), "work that fails fails the play");
    place.assert_free("ansible/site").await;
}

#[tokio::test]
async fn terraform_writes_a_state_once_at_a_time() {
    let place = Place::new(&["change"]).await;
    if !is_here(&place, &["terraform", "version"]).await {
        return;
    }
    let resource = r#"resource "terraform_data" "it" {
        triggers_replace = [timestamp()]
        provisioner "local-exec" { command = "change" }
    }"#;
    place.file("main.tf", resource);
    let of = |words: &[&str]| {
        let mut command = place.command(words);
        command
            .env("HOME", place.path(""))
            .env("CHECKPOINT_DISABLE", "1")
            .env("TF_IN_AUTOMATION", "1");
        command
    };
    let (code, output) = run(of(&["terraform", "init", "-input=false"])).await;
    assert_eq!(code, Some(0), "{output}");
    let block = place.block("Terraform without a lock of its own", "sh", 0);
    together(3, || of(&["sh", "-c", &block])).await;
    place.assert_one_at_a_time(3);
    let state = std::fs::read_to_string(place.path("terraform.tfstate")).unwrap();
    let state: Value = serde_json::from_str(&state).expect("a whole file");
    assert_eq!(state["resources"].as_array().map(Vec::len), Some(1));
}
