//! Files that change while filegen-server runs.

use std::time::{Duration, Instant};

use api::file_generator::{Generators, OrderRevision, OrderRevisionRequest, RevisionOrder};

use testing::eventually;

use crate::server::{Server, machine};

/// What is shown while a set is not in force.
async fn failing(server: &Server) -> bool {
    server.metrics().await.contains("configuration_failing 1\n")
}

const TEMPLATE: &str = r#"
[[generator]]
path = "/etc/a"
kind = "template"
file = "a.j2"
variables = "vars.json"
"#;

/// A server with one template.
async fn one_template() -> Server {
    let mut server = Server::new();
    server.write("a.j2", "{{ Hostname }} {{ Variables.word }}\n");
    server.write("vars.json", "{\"word\": \"first\"}");
    server.configure(TEMPLATE);
    server.start().await;
    server
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_with_an_error_leaves_the_last_good_set_in_force() {
    let server = one_template().await;
    let web1 = machine("web1", "");
    let (good, told) = server.next(None).await;
    assert_eq!(told.error, "");
    let config = server.configuration(TEMPLATE);
    let half = &config[..config.len() - 5];
    let changes = [
        (
            "a.j2",
            "{{ Hostname }\n",
            "DIR/a.j2: line 1: syntax error: unexpected `}`, expected end of variable block",
        ),
        (
            "vars.json",
            "{\"word\": \"fir",
            "DIR/vars.json: EOF while parsing a string at line 1 column 13",
        ),
        ("config.toml", half, "DIR/config.toml: line 9: invalid basic string, expected `\"`"),
        (
            "config.toml",
            "",
            "DIR/config.toml: line 1: there is no [[generator]]: add one that says how a file is \
             made",
        ),
    ];
    let mut have = good;
    for (name, text, error) in changes {
        let error = error.replace("DIR", &server.directory.path().display().to_string());
        let before = std::fs::read_to_string(server.path(name)).unwrap();
        server.write(name, text);
        let (version, told) = server.next(Some(have)).await;
        assert_eq!(told.error, error);
        assert_eq!(server.file(&web1, "/etc/a").await, Ok("web1 first\n".to_owned()), "{error}");
        let page = server.page("/").await;
        let shown =
            format!("<p class=\"bad\">The newest configuration is not in force: {error}</p>");
        assert!(page.contains(&shown), "{shown} in {page}");
        assert!(failing(&server).await);
        eventually("the log has it", || match server.log() {
            log if log.contains(&error) => Ok(()),
            log => Err(log),
        });
        let (code, out, said) = server.tool(&["list"]);
        assert_eq!(code, Some(3));
        assert!(out.contains("/etc/a"), "{out}");
        let warning = format!("warning: the newest configuration is not in force: {error}\n");
        assert_eq!(said, warning);
        // The former text is in force again as if nothing had been.
        server.write(name, &before);
        let (back, told) = server.next(Some(version)).await;
        assert_eq!((back, &*told.error), (good, ""));
        assert!(!failing(&server).await);
        have = back;
    }
    assert!(!server.page("/").await.contains("class=\"bad\""));
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_are_saved_one_after_another_are_one_set() {
    let server = one_template().await;
    let web1 = machine("web1", "");
    let mut have = server.next(None).await.0;
    for round in 0..20 {
        let text = |word: &str| format!("{word} {round}");
        let before = server.audited("load-generators").len();
        let (mut longest, mut last) = (Duration::ZERO, Instant::now());
        // In an order in which no set before the last file is good.
        let files = [
            ("a.j2", format!("{{{{ Variables.{} }}}}\n{{% include %}}", "new")),
            ("config.toml", server.configuration("[[generator")),
            ("vars.json", "{".to_owned()),
            ("a.j2", "{{ Variables.new }}\n".to_owned()),
            ("config.toml", server.configuration(TEMPLATE)),
            ("vars.json", format!("{{\"new\": \"{}\"}}", text("word"))),
        ];
        for (name, content) in files {
            server.write(name, &content);
            longest = longest.max(last.elapsed());
            last = Instant::now();
            tokio::time::sleep(Duration::from_millis(400)).await;
        }
        let (_, told) = server.next(Some(have)).await;
        if longest > Duration::from_secs(1) {
            // This machine is so busy that the files were not saved one right after another.
            server.wait_for_file(&web1, "/etc/a", &format!("{}\n", text("word"))).await;
            have = server.next(None).await.0;
            continue;
        }
        assert_eq!(told.error, "");
        assert_eq!(server.file(&web1, "/etc/a").await, Ok(format!("{}\n", text("word"))));
        let loads = server.audited("load-generators");
        assert_eq!(loads.len(), before + 1, "{loads:?}");
        return;
    }
    panic!("this machine is too busy");
}

#[tokio::test(flavor = "multi_thread")]
async fn generators_come_and_go_and_files_may_be_edited_in_place() {
    let server = one_template().await;
    let web1 = machine("web1", "nyc/r4");
    let (version, _) = server.next(None).await;
    std::fs::write(server.path("vars.json"), "{\"word\": \"second\"}").unwrap();
    server.wait_for_file(&web1, "/etc/a", "web1 second\n").await;
    assert_ne!(server.next(None).await.0, version);

    server.write("files/*", "all\n");
    server.configure(
        "[[generator]]\npath = \"/etc/b\"\nkind = \"directory\"\ndirectory = \"files\"\n\
         by = \"Location\"\n",
    );
    server.wait_for_file(&web1, "/etc/b", "all\n").await;
    let gone = Err("no generator makes /etc/a".to_owned());
    assert_eq!(server.file(&web1, "/etc/a").await, gone);
    // Files that are new in a directory, and in one that is new in it.
    server.write("files/nyc/r4", "rack\n");
    server.wait_for_file(&web1, "/etc/b", "rack\n").await;
    std::fs::remove_dir_all(server.path("files/nyc")).unwrap();
    server.wait_for_file(&web1, "/etc/b", "all\n").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_that_is_whole_again_is_taken_after_files_were_missing() {
    let server = one_template().await;
    let web1 = machine("web1", "");
    let (good, _) = server.next(None).await;
    for name in ["vars.json", "a.j2", "config.toml"] {
        let before = std::fs::read_to_string(server.path(name)).unwrap();
        std::fs::remove_file(server.path(name)).unwrap();
        let (version, told) = server.next(Some(good)).await;
        let missing =
            format!("cannot read {}: No such file or directory (os error 2)", server.text(name));
        assert!(told.error.ends_with(&missing), "{}", told.error);
        assert_eq!(server.file(&web1, "/etc/a").await, Ok("web1 first\n".to_owned()));
        server.write(name, &before);
        assert_eq!(server.next(Some(version)).await.0, good);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_change_is_a_revision_that_can_be_stopped_and_numbers_last_over_a_restart() {
    let mut server = one_template().await;
    let numbers = |told: &Generators| {
        let of_paths = told.generators.iter().map(|generator| generator.revision);
        (told.revision, of_paths.collect::<Vec<_>>())
    };
    let (version, first) = server.next(None).await;
    assert_eq!((numbers(&first), first.orders.clone()), ((1, vec![1]), vec![]));
    let file = "[[generator]]\npath = '/etc/0'\nkind = 'file'\nfile = 'zero'\n";
    server.write("zero", "0\n");
    server.configure(&format!("{file}{TEMPLATE}"));
    let (version, second) = server.next(Some(version)).await;
    assert_eq!(numbers(&second), (2, vec![2, 1]));

    let order = async |server: &Server, revision, stopped: Option<&str>| {
        let (stopped, why) = (stopped.map(str::to_owned), "a test".to_owned());
        let request = OrderRevisionRequest { revision, stopped, why };
        server.client.call::<OrderRevision>(&request).await.map(|reply| reply.number)
    };
    let stopped = RevisionOrder { revision: 2, number: 1, stopped: Some("it is bad".to_owned()) };
    assert_eq!(order(&server, 2, Some("it is bad")).await.unwrap(), 1);
    let (version, told) = server.next(Some(version)).await;
    assert_eq!((numbers(&told), &told.orders), ((2, vec![2, 1]), &vec![stopped.clone()]));
    let why = model::display::error_chain(&order(&server, 3, None).await.unwrap_err());
    assert!(why.ends_with("there is no content revision 3: the newest is 2"), "{why}");
    assert!(server.page("/").await.contains("revision 2 has stopped: it is bad"));

    server.kill();
    server.start().await;
    let (again, told) = server.next(None).await;
    assert_eq!((again, told.numbering), (version, first.numbering));
    assert_eq!((numbers(&told), told.orders), ((2, vec![2, 1]), vec![stopped]));
    assert_eq!(order(&server, 2, None).await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_taken_at_once_by_order_and_errors_are_told() {
    let server = one_template().await;
    let web1 = machine("web1", "");
    server.write("a.j2", "at once\n");
    let load = || server.tool(&["load", "--why", "now"]);
    let done = (Some(0), "Content revision 2 is in force.\n".to_owned(), String::new());
    assert_eq!(load(), done);
    assert_eq!(server.file(&web1, "/etc/a").await, Ok("at once\n".to_owned()));
    assert_eq!(load(), done, "nothing has changed");
    server.write("a.j2", "{{ bad\n");
    let (code, out, said) = load();
    assert_eq!((code, out), (Some(3), "Content revision 2 is in force.\n".to_owned()));
    assert!(said.starts_with("warning: the newest configuration is not in force: "), "{said}");
    assert_eq!(server.audited("FileGenerator.Load").len(), 6, "a call and its end, thrice");
}
