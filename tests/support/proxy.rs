//! Real proxies in front of gateways: nginx and HAProxy.

use std::net::SocketAddr;
use std::process::{Child, Stdio};

use http::Method;

use crate::support::client::Call;
use crate::support::gateway::{Gateway, source_root};
use crate::support::harness::{TempDir, dies_with_us, eventually};

/// A running proxy.
pub(crate) struct Proxy {
    address: SocketAddr,
    process: Child,
    _folder: TempDir,
}

impl Proxy {
    /// An nginx with this text inside of `http { … }`. The text listens at `address`.
    pub(crate) async fn nginx(gateway: &Gateway, address: SocketAddr, text: &str) -> Self {
        let folder = TempDir::new();
        let here = folder.path().display();
        let text = format!(
            "daemon off; worker_processes 1; pid {here}/pid; error_log {here}/error.log;
             events {{}}
             http {{
               access_log off; client_body_temp_path {here}/a; proxy_temp_path {here}/b; fastcgi_temp_path {here}/c;
               uwsgi_temp_path {here}/d; scgi_temp_path {here}/e;
               {text}
             }}"
        );
        let file = folder.path().join("nginx.conf");
        std::fs::write(&file, text).expect("a file");
        let mut command = dies_with_us("/usr/sbin/nginx");
        // While a gateway drains, nginx logs every request that it sends elsewhere.
        command.args(["-e", "error.log", "-p"]).arg(folder.path()).arg("-c").arg(&file);
        let process = command.stdin(Stdio::null()).spawn().expect("nginx starts");
        Self { address, process, _folder: folder }.answers(gateway).await
    }

    /// A HAProxy with this configuration, which listens at `address`.
    pub(crate) async fn haproxy(gateway: &Gateway, address: SocketAddr, text: &str) -> Self {
        let folder = TempDir::new();
        let file = folder.path().join("haproxy.cfg");
        std::fs::write(&file, format!("global\n    nbthread 1\n\n{text}")).expect("a file");
        let mut command = dies_with_us("/usr/sbin/haproxy");
        command.args(["-q", "-db", "-f"]).arg(&file);
        let process = command.stdin(Stdio::null()).spawn().expect("haproxy starts");
        Self { address, process, _folder: folder }.answers(gateway).await
    }

    async fn answers(self, gateway: &Gateway) -> Self {
        eventually("the proxy answers", async || {
            let call = gateway.call(Method::GET, "/livez").to(self.address);
            call.try_send().await.ok().filter(|answer| answer.status == 200)
        })
        .await;
        self
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// A call to the gateway through this proxy.
    pub(crate) fn call(&self, gateway: &Gateway, method: Method, path: &str) -> Call {
        gateway.call(method, path).to(self.address)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // When the main process ends, its workers end too.
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.process),
            rustix::process::Signal::TERM,
        );
        let _ = self.process.wait();
    }
}

/// The configuration of one kind of proxy, from the gateway's documentation.
pub(crate) fn documented(kind: &str) -> String {
    let page = source_root().join("crates/redlock-gateway/docs/behind-a-proxy.md");
    let page = std::fs::read_to_string(page).expect("the page exists");
    let (_, rest) = page.split_once(&format!("```{kind}\n")).expect("the page has this part");
    rest.split_once("```").expect("the block ends").0.to_owned()
}

/// Replaces a part of a documented configuration. The part must be there.
pub(crate) fn with(text: &str, part: &str, replacement: &str) -> String {
    assert!(text.contains(part), "the page no longer has {part:?}:\n{text}");
    text.replace(part, replacement)
}
