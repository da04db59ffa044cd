//! Programs and web servers that fail.

use std::fs;
use std::time::{Duration, Instant};

use crate::server::{Server, machine};
use crate::web::{Answer, Web};

/// The pause after the first failure.
const PAUSE: Duration = Duration::from_secs(5);

const FORM: &str = r#"expected {"Data": "BASE64", "SecondsValid": SECONDS}"#;

/// A generator of each program, at `/p/NAME`.
fn programs(names: &[&str], more: &str) -> String {
    let one = |name: &&str| {
        format!(
            "[[generator]]\npath = \"/p/{name}\"\nkind = \"program\"\ncommand = [\"bin/{name}\"]\n\
             {more}\n"
        )
    };
    names.iter().map(one).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_fails_gives_a_reason_and_no_file() {
    let mut server = Server::new();
    let directory = server.directory.path().display().to_string();
    let large = "head -c 4194305 /dev/zero | base64 -w0";
    let table: [(&str, &str, String); 13] = [
        (
            "exits-1",
            "echo '{\"Data\": \"YQ==\"}'; echo s3cret >&2; exit 1",
            "DIR/bin/exits-1: exit status: 1".into(),
        ),
        ("killed", "kill -9 $$", "DIR/bin/killed: signal: 9 (SIGKILL)".into()),
        (
            "hangs",
            "echo '{\"Data\": \"YQ==\"}'; echo $$ > \"$0.pid\"; sleep 600",
            "not done within 2 s".into(),
        ),
        (
            "closes",
            "echo '{\"Data\": \"YQ==\"}'; exec >&- 2>&-; sleep 600",
            "not done within 2 s".into(),
        ),
        ("nothing", "cat > /dev/null", format!("the answer is empty: {FORM}")),
        ("blanks", "echo; echo", format!("the answer is empty: {FORM}")),
        ("garbage", "echo s3cret", format!("the answer is not valid in line 1, column 1: {FORM}")),
        (
            "binary",
            "head -c 1000 /dev/zero",
            format!("the answer is not valid in line 1, column 1: {FORM}"),
        ),
        (
            "half",
            "printf '{\"Data\": \"YQ'",
            format!("the answer is not valid in line 1, column 12: {FORM}"),
        ),
        (
            "twice",
            "echo '{\"Data\": \"YQ==\"}'; echo '{}'",
            format!("the answer is not valid in line 2, column 1: {FORM}"),
        ),
        (
            "no-base64",
            "echo '{\"Data\": \"s3cret!\"}'",
            "Data is not base64, from character 4".into(),
        ),
        (
            "empty",
            "echo '{\"Data\": \"\"}'",
            "the content is empty; if that is meant, set allow_empty = true".into(),
        ),
        (
            "large",
            &format!("printf '{{\"Data\": \"%s\"}}' \"$({large})\""),
            "the content has 4194305 bytes; 4194304 are allowed".into(),
        ),
    ];
    let names: Vec<&str> = table.iter().map(|(name, _, _)| *name).collect();
    for (name, script, _) in &table {
        // What it prints is a secret.
        server.program(&format!("bin/{name}"), &format!("echo . >> \"$0.runs\"\n{script}"));
    }
    server.program("bin/not-executable", "");
    fs::set_permissions(
        server.path("bin/not-executable"),
        std::os::unix::fs::PermissionsExt::from_mode(0o644),
    )
    .unwrap();
    server.program("bin/good", "echo '{\"Data\": \"YQ==\"}'");
    let config = programs(&names, "timeout = 2") + &programs(&["not-executable", "good"], "");
    server.configure(&config);
    server.start().await;
    let web1 = machine("web1", "");
    let mut paths: Vec<String> = names.iter().map(|name| format!("/p/{name}")).collect();
    paths.extend(["/p/not-executable".to_owned(), "/p/good".to_owned()]);
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let mut expected: Vec<Result<String, String>> =
        table.iter().map(|(_, _, why)| Err(why.replace("DIR", &directory))).collect();
    expected.push(Err(format!(
        "cannot run {directory}/bin/not-executable: Permission denied (os error 13)"
    )));
    expected.push(Ok("a".to_owned()));
    let started = Instant::now();
    assert_eq!(server.files(&web1, &paths).await, expected);
    assert_eq!(server.files(&web1, &paths).await, expected);
    let metrics = server.metrics().await;
    let runs = |name: &&str| fs::read_to_string(server.path(&format!("bin/{name}.runs"))).unwrap();
    let runs: Vec<String> = names.iter().map(runs).collect();
    let pid = fs::read_to_string(server.path("bin/hangs.pid")).unwrap();
    testing::eventually("the program is killed", || {
        !fs::exists(format!("/proc/{}", pid.trim())).unwrap()
    });
    if started.elapsed() > PAUSE {
        println!("SKIPPED: this machine is too busy to see that nothing runs again at once");
        return;
    }
    assert_eq!(runs, vec![".\n"; names.len()]);
    for (name, failures) in names.iter().map(|name| (*name, 1)).chain([("good", 0)]) {
        let line = format!("failures_total{{path=\"/p/{name}\"}} {failures}\n");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    let page = server.page("/").await;
    for path in &paths[..names.len()] {
        let row = page.split("<tr>").find(|row| row.contains(path)).unwrap();
        let why = expected[paths.iter().position(|other| other == path).unwrap()].clone();
        let cell = format!("<td class=\"bad\">web1: {} (", why.unwrap_err());
        assert!(row.contains(&cell), "{cell} in {row}");
    }
    for (place, text) in [("log", server.log()), ("page", page), ("metrics", metrics)] {
        assert!(!text.contains("s3cret"), "{place}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_prints_a_gigabyte_is_ended_before_it_has() {
    let mut server = Server::new();
    // It can tell only if all was taken.
    server.program("bin/gigabyte", "head -c 1073741824 /dev/zero && touch \"$0.done\"");
    server.configure(&programs(&["gigabyte"], ""));
    server.start().await;
    let program = server.text("bin/gigabyte");
    let why = format!("{program} prints more than 5657940 bytes");
    assert_eq!(server.file(&machine("web1", ""), "/p/gigabyte").await, Err(why));
    assert!(!server.path("bin/gigabyte.done").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_web_server_that_fails_gives_a_reason_and_no_file() {
    let (mut server, web) = (Server::new(), Web::default());
    let port = web.start().await;
    let raw = |text: &str| Answer::Raw(text.to_owned());
    let document = |text: &str| {
        Answer::Raw(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}", text.len()))
    };
    let url = |name: &str| format!("http://127.0.0.1:{port}/{name}");
    let large = format!("{{\"Data\": \"{}\"}}", "A".repeat(6 << 20));
    let table: [(&str, Answer, String); 10] = [
        (
            "500",
            raw("HTTP/1.1 500 s3cret\r\ncontent-length: 6\r\n\r\ns3cret"),
            format!("{} answers 500 Internal Server Error", url("500")),
        ),
        (
            "404",
            raw("HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n"),
            format!("{} answers 404 Not Found", url("404")),
        ),
        ("never", Answer::Silence, "not done within 2 s".into()),
        ("slowly", Answer::Drip, "not done within 2 s".into()),
        ("large", document(&large), format!("{} has more than 5657940 bytes", url("large"))),
        ("empty", document(""), format!("the answer is empty: {FORM}")),
        (
            "garbage",
            document("<html>s3cret"),
            format!("the answer is not valid in line 1, column 1: {FORM}"),
        ),
        (
            "no-base64",
            document("{\"Data\": \"s3cret!\"}"),
            "Data is not base64, from character 4".into(),
        ),
        (
            "no-http",
            raw("s3cret\r\n\r\n"),
            format!("{} gave no whole answer: invalid HTTP version parsed", url("no-http")),
        ),
        (
            "cut",
            raw("HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{\"Data\": \"s3cret"),
            format!(
                "{} gave no whole answer: error reading a body from connection: end of file \
                 before message length reached",
                url("cut")
            ),
        ),
    ];
    let mut config = String::new();
    for (name, answer, _) in &table {
        web.answer_with(
            &format!("/{name}?pathname=%2fu%2f{}", name.replace('-', "%2d")),
            answer.clone(),
        );
        config.push_str(&format!(
            "[[generator]]\npath = \"/u/{name}\"\nkind = \"url\"\nurl = \"{}\"\ntimeout = 2\n",
            url(name)
        ));
    }
    let closed = crate::server::free_port();
    config.push_str(&format!(
        "[[generator]]\npath = \"/u/closed\"\nkind = \"url\"\n\
         url = \"http://127.0.0.1:{closed}/?key=s3cret\"\n"
    ));
    server.configure(&config);
    server.start().await;
    let mut paths: Vec<String> = table.iter().map(|(name, ..)| format!("/u/{name}")).collect();
    paths.push("/u/closed".to_owned());
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let web1 = machine("web1", "");
    let started = Instant::now();
    let got = server.files(&web1, &paths).await;
    let mut expected: Vec<Result<String, String>> =
        table.iter().map(|(.., why)| Err(why.clone())).collect();
    expected.push(Err(format!(
        "cannot connect to http://127.0.0.1:{closed}/: Connection refused (os error 111)"
    )));
    assert_eq!(got, expected);
    // Nothing is asked again before its pause is over.
    assert_eq!(server.files(&web1, &paths).await, got);
    let count = web.requests().len();
    assert!(count == table.len() || started.elapsed() > PAUSE, "{count}");
    let told =
        format!("{got:?}{}{}{}", server.log(), server.page("/").await, server.metrics().await);
    assert!(!told.contains("s3cret"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn content_that_ends_is_made_again_and_a_failure_is_told() {
    let mut server = Server::new();
    server.program(
        "bin/short",
        "echo . >> \"$0.runs\"\n[ ! -e \"$0.fail\" ] || exit 7\n\
         printf '{\"Data\": \"%s\", \"SecondsValid\": 1}' \"$(wc -l < \"$0.runs\" | base64 -w0)\"",
    );
    server.configure(&programs(&["short"], "secret = false"));
    server.start().await;
    let web1 = machine("web1", "");
    server.wait_for_file(&web1, "/p/short", "1\n").await;
    server.wait_for_file(&web1, "/p/short", "2\n").await;
    server.write("bin/short.fail", "");
    let why = Err(format!("{}: exit status: 7", server.text("bin/short")));
    testing::eventually_async("it fails", async || {
        let file = server.file(&web1, "/p/short").await;
        if file == why { Ok(()) } else { Err(file) }
    })
    .await;
    let metrics = server.metrics().await;
    assert!(metrics.contains("failures_total{path=\"/p/short\"} 1\n"), "{metrics}");
    // It is tried again after a pause, which ends by itself.
    fs::remove_file(server.path("bin/short.fail")).unwrap();
    let runs = fs::read_to_string(server.path("bin/short.runs")).unwrap().lines().count();
    server.wait_for_file(&web1, "/p/short", &format!("{}\n", runs + 1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn content_that_ends_before_the_slowest_file_is_made_is_given_once() {
    let mut server = Server::new();
    let short = r#"echo '{"Data": "YQ==", "SecondsValid": 1}'"#;
    server.program("bin/short", &format!("echo . >> \"$0.runs\"\n{short}"));
    server.program("bin/slow", &format!("sleep 3\n{short}"));
    server.configure(&programs(&["slow", "short"], ""));
    server.start().await;
    let files = server.files(&machine("web1", ""), &["/p/slow", "/p/short"]).await;
    assert_eq!(files, [Ok("a".to_owned()), Ok("a".to_owned())]);
    assert_eq!(fs::read_to_string(server.path("bin/short.runs")).unwrap(), ".\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_runs_as_its_user_a_few_at_a_time() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED: only root can run a program as another user");
        return;
    }
    let mut server = Server::new();
    server.program("bin/who", "printf '{\"Data\": \"%s\"}' \"$( (id -un; id -Gn) | base64 -w0)\"");
    // Each counts those that run with it.
    server.program(
        "bin/count",
        "mkdir \"$0.d/$$\"; sleep 0.2; count=$(ls \"$0.d\" | wc -l); rmdir \"$0.d/$$\"\n\
         printf '{\"Data\": \"%s\"}' \"$(echo $((count <= 2)) | base64 -w0)\"",
    );
    fs::create_dir(server.path("bin/count.d")).unwrap();
    let config = programs(&["who"], "user = \"nobody\"") + &programs(&["count"], "concurrency = 2");
    server.configure(&config);
    server.start().await;
    let web1 = machine("web1", "");
    assert_eq!(server.file(&web1, "/p/who").await, Ok("nobody\nnogroup\n".to_owned()));
    let machines: Vec<_> = (0..9).map(|number| machine(&format!("web{number}"), "")).collect();
    for made in server.generate(&machines, &["/p/count"]).await {
        assert_eq!(made.len(), 1);
    }
    for machine in &machines {
        assert_eq!(server.file(machine, "/p/count").await, Ok("1\n".to_owned()));
    }
}
