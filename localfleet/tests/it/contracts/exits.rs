//! Exit codes: 0 done (compared: the same), 1 failed, 2 misuse, 3 partly done (compared:
//! different).

use std::fs;

use super::site::Site;

/// What is run by each tool; it knows its server.
const LINES: [&str; 51] = [
    "imagetool list",
    "imagetool diff web/1 web/1",
    "imagetool diff web/1 web/2",
    "imagetool diff web/1 none",
    "imagetool check web/1",
    "imagetool check none",
    "imagetool verify web/1",
    "imagetool verify none",
    "imagetool find-latest none",
    "imagetool get-file web/1 /none",
    "imagetool add web/1 one - - --required-paths=",
    "imagetool delete --yes none",
    "imagetool list --imageserver 127.0.0.1:1",
    "imagetool list --unknown",
    "imagetool list --sort unknown",
    "imagetool unknown",
    "imagetool",
    "domtool list-subs",
    "domtool show-sub none",
    "domtool plan sub-1",
    "domtool plan sub-1 --image web/1",
    "domtool mdb diff mdb.json",
    "domtool mdb diff candidate.json",
    "domtool trust sub-1 --why meant",
    "domtool list-subs --status unknown",
    "domtool list-subs --dominator 127.0.0.1:1",
    "domtool list-subs --unknown",
    "domtool cron @daily",
    "domtool cron @yearly",
    "domtool cron @daily --at noon",
    "domtool task schedule none",
    "domtool task",
    "domtool cert show issued",
    "domtool cert show none",
    "domtool audit verify dominator/audit/audit.log",
    "domtool audit verify broken.log",
    "subtool poll",
    "subtool show-update web/2",
    "subtool show-update web/1",
    "subtool show-update none",
    "subtool get-file /none",
    "subtool poll --subd 127.0.0.1:1",
    "subtool set-config",
    "subtool provision",
    "subtool provision --local none",
    "fs2objectcache --unknown",
    "filegen-client list",
    "filegen-client get none /etc/resolv.conf",
    "filegen-client check none",
    "filegen-client diff none",
    "filegen-client diff generators/config.toml",
];

/// What is run with nothing but these words.
const BARE: [&str; 15] = [
    "imagetool --version",
    "imagetool --help",
    "imagetool list",
    "domtool --insecure --dominator : list-subs",
    "subtool --insecure --subd : poll",
    "imageserver --unknown",
    "imageserver --insecure --data notes --listen 127.0.0.1:0",
    "imageserver check --data imageserver",
    "dominator --unknown",
    "dominator --insecure --state notes --listen 127.0.0.1:0",
    "subd --unknown",
    "mdbd --unknown",
    "filegen-client --insecure --filegen-server : list",
    "filegen-server --unknown",
    "filegen-server --insecure --config notes --listen 127.0.0.1:0",
];

/// A line for each command: its exit code. Says also what of it a script must not read: an error
/// is told on standard error alone, as a line that begins with `error: `.
pub fn all(site: &Site) -> String {
    let log = fs::read_to_string(site.at("dominator/audit/audit.log")).unwrap();
    site.write("broken.log", &log.replace("sub-1", "sub-2"));
    let mut text = String::new();
    let bare = BARE.iter().map(|line| (*line, false));
    for (line, knows_server) in LINES.iter().map(|line| (*line, true)).chain(bare) {
        let ended = if knows_server {
            site.run(line)
        } else {
            let (program, words) = line.split_once(' ').unwrap();
            site.run_words(program, words.split(' '))
        };
        text.push_str(&format!("{}  {line}\n", ended.code));
        if matches!(ended.code, 1 | 2) && !line.contains("check") && !line.contains("verify") {
            assert_eq!(ended.out, "", "{line}");
            let is_error = |line: &str| line.starts_with("error: ") || line.starts_with("Usage: ");
            assert!(
                ended.said.lines().any(is_error) || line == "imagetool",
                "{line}: {}",
                ended.said
            );
        }
    }
    text
}
