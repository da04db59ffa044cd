//! How filegen-server starts, and refuses to, and ends.

use std::process::Command;

use testing::exit_and_output;

use crate::server::{Server, machine};

/// The name of a file, and its text.
type File<'text> = (&'text str, &'text str);

#[test]
fn it_tells_its_version_and_refuses_unknown_flags() {
    let run = |flag: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_filegen-server")).arg(flag).output();
        exit_and_output(&output.unwrap())
    };
    let version = format!("filegen-server {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(run("--version"), (Some(0), version, String::new()));
    let (code, out, said) = run("--no-such-flag");
    assert_eq!((code, &*out), (Some(2), ""));
    assert!(said.contains("--no-such-flag"), "{said}");
}

/// Starts a server that must not start; gives its exit code and what it says.
fn refused(server: &Server) -> (Option<i32>, String) {
    let command = server.command();
    let mut bounded = Command::new("timeout");
    bounded.arg("60").arg(command.get_program()).args(command.get_args());
    let (code, out, said) = exit_and_output(&bounded.output().unwrap());
    assert_eq!(out, "");
    // It warns of --insecure first.
    let said = said.lines().filter(|line| !line.contains(" WARN "));
    (code, said.map(|line| format!("{line}\n")).collect())
}

#[test]
fn what_is_wrong_at_the_start_is_said_with_its_file_and_line() {
    let generator = |rest: &str| format!("\n[[generator]]\npath = \"/etc/a\"\n{rest}\n");
    let template = generator("kind = \"template\"\nfile = \"a.j2\"\nvariables = \"vars.json\"");
    let of_toml = template.replace("vars.json", "vars.toml");
    let directory = generator("kind = \"directory\"\ndirectory = \"files\"\nby = \"Location\"");
    let program = generator("kind = \"program\"\ncommand = [\"bin/a\"]");
    let of_nobody =
        program.replace("]\n\n", "]\n").replace("a\"]", "a\"]\nuser = \"no-such-user\"");
    let device = generator("kind = \"file\"\nfile = \"/dev/zero\"");
    let file = generator("kind = \"file\"\nfile = \"a.j2\"");
    let good = ("vars.json", "{\"a\": 1}");
    let none = "No such file or directory (os error 2)";
    #[rustfmt::skip]
    let table: [(&str, &[File], String); 17] = [
        // The configuration is saved half, or names what is not there.
        ("\n[[generator]]\npath = \"/etc/a\"\n", &[],
         "config.toml: line 5: `kind` is missing".into()),
        ("", &[], "config.toml: line 1: there is no [[generator]]: add one that says how a file is \
                   made".into()),
        ("\n[[generator]]\npath = \"/etc/../shadow\"\nkind = \"mdb\"\n", &[],
         "config.toml: line 6: bad path: path `/etc/../shadow` has the bad component `..`: `.` and \
          `..` are not names".into()),
        ("\n[[generator]]\npath = \"etc/a\"\nkind = \"mdb\"\n", &[],
         "config.toml: line 6: bad path: path `etc/a` is not absolute".into()),
        (&template, &[], format!("config.toml: line 5: cannot read DIR/a.j2: {none}")),
        (&template, &[("a.j2", "a")],
         format!("config.toml: line 5: cannot read DIR/vars.json: {none}")),
        (&device, &[], "config.toml: line 5: /dev/zero is no regular file".into()),
        (&file, &[("a.j2", "")],
         "config.toml: line 5: DIR/a.j2 is empty; if that is meant, set allow_empty = true".into()),
        (&program, &[], format!("config.toml: line 5: cannot read DIR/bin/a: {none}")),
        (&of_nobody, &[("bin/a", "#!/bin/sh")],
         "config.toml: line 5: there is no user `no-such-user`".into()),
        (&directory, &[], format!("config.toml: line 5: cannot read DIR/files: {none}")),
        // Templates with errors.
        (&template, &[("a.j2", "a\n\n{% if Hostname %}\n"), good],
         "a.j2: line 3: syntax error: unexpected end of input, expected end of block".into()),
        (&template, &[("a.j2", "a\n\n{% include '/etc/shadow' %}"), good],
         "a.j2: line 3: syntax error: unknown statement include".into()),
        // Variables that were cut short.
        (&template, &[("a.j2", "a"), ("vars.json", "{\n  \"a\": [1,\n")],
         "vars.json: EOF while parsing a value at line 3 column 0".into()),
        (&template, &[("a.j2", "a"), ("vars.json", "")],
         "vars.json: EOF while parsing a value at line 1 column 0".into()),
        (&template, &[("a.j2", "a"), ("vars.json", "[1]")],
         "vars.json: line 1: expected an object: {\"NAME\": VALUE, ...}".into()),
        (&of_toml, &[("a.j2", "a"), ("vars.toml", "a = 1\nb = [1,\n")],
         "vars.toml: line 2: unclosed array, expected `]`".into()),
    ];
    for (config, files, expected) in table {
        let server = Server::new();
        server.configure(config);
        files.iter().for_each(|(name, text)| server.write(name, text));
        let expected = format!("error: DIR/{expected}\n");
        let expected = expected.replace("DIR", &server.directory.path().display().to_string());
        assert_eq!(refused(&server), (Some(1), expected));
    }
}

#[test]
fn a_configuration_that_is_cut_short_or_missing_is_misuse() {
    let server = Server::new();
    server.configure("\n[[generator]]\npath = \"/etc/a");
    let config = server.text("config.toml");
    let said = format!(
        "error: `{config}` is not TOML: TOML parse error at line 6, column 15\n  |\n\
         6 | path = \"/etc/a\n  |               ^\ninvalid basic string, expected `\"`\n\n"
    );
    assert_eq!(refused(&server), (Some(2), said));
    std::fs::remove_file(&config).unwrap();
    let (code, said) = refused(&server);
    assert_eq!(code, Some(2));
    assert!(said.contains(&config), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_it_while_callers_and_programs_wait() {
    let mut server = Server::new();
    server.program("bin/hang", "echo $$ > \"$0.pid\"; exec sleep 600");
    server.configure(
        "[[generator]]\npath = \"/etc/a\"\nkind = \"program\"\ncommand = [\"bin/hang\"]\n",
    );
    server.start().await;
    let (version, _) = server.next(None).await;
    let web1 = machine("web1", "");
    let pid = server.path("bin/hang.pid");
    let ended = {
        let news = server.next(Some(version));
        let made = server.file(&web1, "/etc/a");
        let started = testing::eventually_async("the program runs", async || {
            std::fs::read_to_string(&pid).ok().filter(|pid| pid.ends_with('\n'))
        });
        tokio::pin!(news, made);
        let pid = tokio::select! {
            pid = started => pid,
            news = &mut news => panic!("{news:?}"),
            made = &mut made => panic!("{made:?}"),
        };
        pid.trim().to_owned()
    };
    assert!(server.terminate().success(), "{}", server.log());
    testing::eventually("the program is killed", || {
        let stat = std::fs::read_to_string(format!("/proc/{ended}/stat")).unwrap_or_default();
        !stat.contains(" S ") && !stat.contains(" R ")
    });
}
