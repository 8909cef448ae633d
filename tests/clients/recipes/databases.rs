//! The PostgreSQL recipe, on a server that the test starts. The server has its files and its socket
//! in its own directory.

use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::json;

use super::{Place, ended, run};
use crate::support::harness::{TempDir, dies_with_us, eventually};

const RECIPE: &str = "PostgreSQL refuses a late writer";

/// A PostgreSQL server. It refuses to run as root. So if the test runs as root, the server runs as
/// Debian's user `postgres`.
struct Postgres {
    dir: TempDir,
    server: Child,
}

/// The directory with the programs of the newest version that is installed.
fn programs() -> PathBuf {
    let versions =
        std::fs::read_dir("/usr/lib/postgresql").expect("Debian's postgresql is installed");
    let bins = versions.map(|version| version.expect("an entry").path().join("bin"));
    let number = |bin: &PathBuf| bin.parent()?.file_name()?.to_str()?.parse::<u32>().ok();
    bins.filter(|bin| bin.join("initdb").exists())
        .max_by_key(number)
        .expect("initdb of Debian's postgresql")
}

/// A program of the server, run as a user that it accepts. The change of user clears the death
/// signal, so this sets the death signal afterwards. INT makes the server end in order.
fn unprivileged(program: &Path) -> Command {
    let mut command = dies_with_us("setpriv");
    if rustix::process::getuid().is_root() {
        command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups"]);
    }
    command.args(["--pdeathsig", "INT"]).arg(program);
    command.stdin(Stdio::null()).stdout(Stdio::null()).current_dir("/");
    command
}

impl Postgres {
    async fn start() -> Self {
        let dir = TempDir::new();
        let bin = programs();
        if rustix::process::getuid().is_root() {
            let owner = |flag: &str| {
                let id =
                    Command::new("id").args([flag, "postgres"]).output().expect("id starts").stdout;
                String::from_utf8(id).expect("text").trim().parse::<u32>().ok()
            };
            chown(dir.path(), owner("-u"), owner("-g")).expect("root may");
        }
        let data = dir.path().join("data");
        let mut made = unprivileged(&bin.join("initdb"));
        made.args(["--auth=trust", "--username=postgres", "--no-sync", "--no-instructions", "-D"])
            .arg(&data);
        let made = made.output().expect("setpriv (util-linux) starts");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut server = unprivileged(&bin.join("postgres"));
        server.arg("-D").arg(&data).arg("-k").arg(dir.path());
        server.args(["-c", "listen_addresses=", "-c", "fsync=off"]).stderr(Stdio::null());
        let server = server.spawn().expect("setpriv (util-linux) starts");
        Self { dir, server }
    }

    /// Sets the variables by which psql finds the server.
    fn for_psql(&self, command: &mut tokio::process::Command) {
        command
            .env("PGHOST", self.dir.path())
            .env("PGUSER", "postgres")
            .env("PGDATABASE", "postgres");
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // After INT the server ends at once and in order. KILL would leave its shared memory
        // behind.
        let _ = kill_process(Pid::from_child(&self.server), Signal::INT);
        let _ = self.server.wait();
    }
}

#[tokio::test]
async fn databases_refuse_the_writes_of_a_paused_holder() {
    let place = Place::new(&[]).await;
    let postgres = Postgres::start().await;
    let psql = |words: &[&str]| {
        let mut command =
            place.command(&[&["psql", "-X", "-v", "ON_ERROR_STOP=1"], words].concat());
        postgres.for_psql(&mut command);
        command
    };
    let up = async || (run(psql(&["-c", "SELECT 1"])).await.0 == Some(0)).then_some(());
    eventually("the database answers", up).await;
    let schema = place.file("schema.sql", &place.block(RECIPE, "sql", 0));
    assert_eq!(run(psql(&["-f", &schema])).await, (Some(0), "CREATE TABLE\nINSERT 0 1\n".into()));
    place.file("write.sql", &place.block(RECIPE, "sql", 1));
    // A holder stops in the middle of its work. It continues after its lock has expired.
    let late = place.gateway.acquire_soon("reports/7", json!({ "ttl_ms": 2_000 })).await;
    let paused = "kill -STOP $$; exec psql -X -v fence=\"$0\" -v body=late -f write.sql";
    let mut paused = place.command(&["sh", "-c", paused, &late.fencing.to_string()]);
    postgres.for_psql(&mut paused);
    let paused = paused.spawn().unwrap();
    let pid = Pid::from_raw(paused.id().unwrap() as i32).unwrap();
    let stopped = async || waitpid(Some(pid), WaitOptions::UNTRACED | WaitOptions::NOHANG).unwrap();
    assert!(eventually("the process is paused", stopped).await.1.stopped());
    eventually("the lock has expired", async || {
        (place.gateway.inspect("reports/7").await["state"] == "free").then_some(())
    })
    .await;
    let write = place.file("write.sh", &place.block(RECIPE, "sh", 0));
    let writer = |body: &str| {
        let mut command = place.command(&["sh", &write, body]);
        postgres.for_psql(&mut command);
        command
    };
    // The body is data. So none of its characters may change the SQL command.
    for body in ["first", "it's; the second"] {
        assert_eq!(run(writer(body)).await, (Some(0), "UPDATE 1\n".into()));
    }
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(
        ended(paused).await,
        (Some(0), "UPDATE 0\n".into()),
        "the old token changes nothing"
    );
    let (_, row) = run(psql(&["-At", "-c", "SELECT body, fence FROM report WHERE id = 7"])).await;
    let (body, fence) = row.trim().split_once('|').unwrap();
    assert_eq!(body, "it's; the second");
    assert!(fence.parse::<u64>().unwrap() > late.fencing);
}
