//! Where callbacks may go, and how they are signed.

#![cfg(test)]

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

/// A time limit that outlasts every test.
const UNLIMITED: Duration = Duration::from_secs(24 * 3_600);

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

fn secrets(text: &str) -> Result<Secrets, SecretsError> {
    Secrets::read("secrets".as_ref(), &Ok(text.as_bytes().to_vec()))
}

/// Callbacks to one origin. Names resolve to each of these lists of addresses in turn; the last one
/// stays.
fn callbacks(origin: &str, networks: &[&str], addresses: Vec<Vec<IpAddr>>) -> Callbacks {
    let settings = CallbackSettings {
        origins: vec![Origin::parse(origin).unwrap()],
        networks: Networks::new(networks.iter().map(|text| text.parse().unwrap()).collect()),
        secret_file: PathBuf::new(),
    };
    let answers = Mutex::new(VecDeque::from(addresses));
    let resolver = CheckedResolver::new(settings.networks.clone(), move |_| {
        let mut answers = answers.lock();
        let next = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
        let found = next.unwrap_or_default().into_iter().map(|ip| SocketAddr::new(ip, 0)).collect();
        Ok(found)
    });
    let secrets = Arc::new(ArcSwap::from_pointee(secrets(SECRET).unwrap()));
    Callbacks::new(&settings, secrets, resolver).unwrap()
}

async fn send(callbacks: &Callbacks, url: &str) -> Result<(), CallbackError> {
    let url = callbacks.check(url).expect("an allowed URL");
    send_within(callbacks, &url, UNLIMITED).await
}

async fn send_within(
    callbacks: &Callbacks,
    url: &CallbackUrl,
    limit: Duration,
) -> Result<(), CallbackError> {
    callbacks.send(&Client::default(), url, "msg_1", || Some("{}".into()), limit).await
}

/// Answers the first request on a listener.
async fn answer_once(listener: &TcpListener, answer: &str) {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut read = [0; 4_096];
    let _ = stream.read(&mut read).await.unwrap();
    stream.write_all(answer.as_bytes()).await.unwrap();
}

async fn was_called(listener: &TcpListener) -> bool {
    tokio::time::timeout(Duration::ZERO, listener.accept()).await.is_ok()
}

/// Addresses that no callback may go to: loopback, private, link-local (with the metadata services
/// of clouds), carrier-grade NAT, documentation, multicast, reserved, and IPv6 addresses that stand
/// for IPv4 addresses.
const FORBIDDEN: [&str; 32] = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "10.255.255.255",
    "100.64.0.1",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.1",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::127.0.0.1",
    "fe80::1",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "64:ff9b::7f00:1",
];

#[tokio::test]
async fn forbidden_addresses_are_refused_in_urls_and_from_names() {
    for text in FORBIDDEN {
        let ip: IpAddr = text.parse().unwrap();
        let host = if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() };
        // The origin is allowed, so only the address check can refuse.
        let origin = Url::parse(&format!("http://{host}:8080")).unwrap();
        let origin = origin.origin().ascii_serialization();
        let direct = callbacks(&origin, &[], Vec::new());
        let refused = direct.check(&format!("{origin}/locks"));
        assert!(matches!(refused, Err(CallbackUrlError::Address(_))), "{text}: {refused:?}");

        let named = callbacks("http://hooks.test:8080", &[], vec![vec![ip]]);
        match send(&named, "http://hooks.test:8080/locks").await {
            Err(CallbackError::Unreachable(why)) => {
                assert!(why.contains("is not a public address"), "{text}: {why}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn other_spellings_of_an_address_are_the_same_address() {
    let callbacks = callbacks("http://127.0.0.1", &[], Vec::new());
    for spelling in ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "127.0.0.1.", "①②⑦.0.0.1"]
    {
        let refused = callbacks.check(&format!("http://{spelling}/"));
        assert!(matches!(refused, Err(CallbackUrlError::Address(_))), "{spelling}: {refused:?}");
    }
}

#[test]
fn public_and_allowed_addresses_pass() {
    let networks = Networks::new(vec!["10.1.0.0/16".parse().unwrap()]);
    for good in ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "10.1.2.3", "::ffff:10.1.2.3"] {
        assert_eq!(networks.check(good.parse().unwrap()), Ok(()), "{good}");
    }
    assert!(networks.check("10.2.0.1".parse().unwrap()).is_err());
}

/// Two loopback addresses: the first one is allowed in these tests.
const ALLOWED: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3));

/// Listeners on both addresses, with the same port.
async fn listeners() -> (TcpListener, TcpListener, u16) {
    loop {
        let allowed = TcpListener::bind((ALLOWED, 0)).await.unwrap();
        let port = allowed.local_addr().unwrap().port();
        if let Ok(other) = TcpListener::bind((OTHER, port)).await {
            return (allowed, other, port);
        }
    }
}

#[tokio::test]
async fn a_name_that_changes_its_address_reaches_nothing_forbidden() {
    let (allowed, other, port) = listeners().await;
    let origin = format!("http://hooks.test:{port}");
    let answers = vec![vec![ALLOWED], vec![OTHER], vec![OTHER, ALLOWED], vec![OTHER]];
    let callbacks = callbacks(&origin, &["127.0.0.2/32"], answers);
    let url = format!("{origin}/locks");
    let ok = "HTTP/1.1 204 No Content\r\n\r\n";
    let (sent, ()) = tokio::join!(send(&callbacks, &url), answer_once(&allowed, ok));
    assert_eq!(sent, Ok(()));
    assert!(matches!(send(&callbacks, &url).await, Err(CallbackError::Unreachable(_))));
    // Of several addresses, only the allowed ones are tried.
    let (sent, ()) = tokio::join!(send(&callbacks, &url), answer_once(&allowed, ok));
    assert_eq!(sent, Ok(()));
    assert!(matches!(send(&callbacks, &url).await, Err(CallbackError::Unreachable(_))));
    assert!(!was_called(&other).await);
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let (allowed, other, port) = listeners().await;
    let origin = format!("http://hooks.test:{port}");
    let callbacks = callbacks(&origin, &["127.0.0.0/8"], vec![vec![ALLOWED], vec![OTHER]]);
    for status in [301, 302, 303, 307, 308] {
        let target = format!("http://{OTHER}:{port}/");
        let answer =
            format!("HTTP/1.1 {status} Moved\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n");
        let callbacks = if status == 301 {
            &callbacks
        } else {
            // Each attempt looks the name up once.
            &super::tests::callbacks(&origin, &["127.0.0.0/8"], vec![vec![ALLOWED], vec![OTHER]])
        };
        let url = format!("{origin}/locks");
        let (sent, ()) = tokio::join!(send(callbacks, &url), answer_once(&allowed, &answer));
        assert_eq!(sent, Err(CallbackError::Status(status)));
    }
    assert!(!was_called(&other).await);
}

#[tokio::test]
async fn a_receiver_without_an_answer_costs_its_time_and_no_more() {
    let (allowed, _other, port) = listeners().await;
    let origin = format!("http://hooks.test:{port}");
    let callbacks = callbacks(&origin, &["127.0.0.0/8"], vec![vec![ALLOWED]]);
    let url = callbacks.check(&format!("{origin}/")).unwrap();
    let sent = send_within(&callbacks, &url, Duration::from_millis(200)).await;
    assert_eq!(sent, Err(CallbackError::TimedOut));
    drop(allowed);
}

#[tokio::test]
async fn one_client_has_sixteen_callbacks_under_way() {
    let (allowed, _other, port) = listeners().await;
    let origin = format!("http://hooks.test:{port}");
    let callbacks = callbacks(&origin, &["127.0.0.0/8"], vec![vec![ALLOWED]]);
    let url = callbacks.check(&format!("{origin}/")).unwrap();
    let client = Client::default();
    let send = |limit| callbacks.send(&client, &url, "msg_1", || Some("{}".into()), limit);
    let mut sixteen: FuturesUnordered<_> = (0..16).map(|_| send(UNLIMITED)).collect();
    let four_more = async {
        let mut open = Vec::new();
        while open.len() < 16 {
            open.push(allowed.accept().await.unwrap());
        }
        futures_util::future::join_all((0..4).map(|_| send(Duration::from_millis(200)))).await
    };
    tokio::select! {
        ended = sixteen.next() => panic!("nobody has answered it: {ended:?}"),
        refused = four_more => {
            let is_busy = |sent: &Result<_, _>| *sent == Err(CallbackError::Busy);
            assert!(refused.iter().all(is_busy), "{refused:?}");
        }
    }
}

#[tokio::test]
async fn lookups_that_hang_keep_a_bounded_number_of_threads() {
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let ended = Mutex::new(ended);
    let begun = Arc::new(AtomicUsize::new(0));
    let count = begun.clone();
    let networks = Networks::new(Vec::new());
    let resolver = CheckedResolver::new(networks.clone(), move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        let _ = ended.lock().recv();
        Ok(Vec::new())
    });
    let settings = CallbackSettings {
        origins: vec![Origin::parse("http://hooks.test").unwrap()],
        networks,
        secret_file: PathBuf::new(),
    };
    let secrets = Arc::new(ArcSwap::from_pointee(secrets(SECRET).unwrap()));
    let callbacks = Callbacks::new(&settings, secrets, resolver).unwrap();
    let url = callbacks.check("http://hooks.test/").unwrap();
    let clients: Vec<_> = (0..40).map(|_| Client::default()).collect();
    let send = |client| callbacks.send(client, &url, "msg_1", || Some("{}".into()), UNLIMITED);
    let mut sends = futures_util::future::join_all(clients.iter().map(send));
    let all_hang = async {
        while begun.load(Ordering::SeqCst) < 16 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(begun.load(Ordering::SeqCst), 16);
        drop(end);
        std::future::pending::<()>().await
    };
    tokio::select! {
        sent = &mut sends => assert!(sent.iter().all(Result::is_err), "{sent:?}"),
        () = all_hang => unreachable!("it is pending"),
    }
}

/// The example of the specification of Standard Webhooks.
#[test]
fn signatures_are_those_of_the_specification() {
    let signature = secrets(SECRET).unwrap().sign(
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1_614_265_330,
        "{\"test\": 2432232314}",
    );
    assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
}

#[test]
fn a_bad_secret_is_named_by_its_line_and_not_shown() {
    let two = secrets(&format!("# comment\n\n{SECRET}\n{SECRET}\n")).unwrap();
    assert_eq!(two.sign("a", 1, "b").split(' ').count(), 2);
    for (bad, word) in [
        ("", "0 secrets"),
        ("# only a comment", "0 secrets"),
        ("\nwhsec_c2hvcnQ=", "line 2"),
        ("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "line 1"),
        ("whsec_***", "line 1"),
        (&*[SECRET; 5].join("\n"), "5 secrets"),
    ] {
        let error = secrets(bad).unwrap_err().to_string();
        assert!(error.contains(word), "{bad}: {error}");
        assert!(bad.is_empty() || !error.contains("c2hvcnQ"), "{error}");
    }
}
