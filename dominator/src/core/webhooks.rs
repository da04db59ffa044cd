//! What webhooks of forges (GitHub, Gitea, Forgejo and those that do as they do) ask for.
// tidy: core

use std::path::PathBuf;

use data_encoding::HEXLOWER;
use hmac::{Hmac, KeyInit as _, Mac as _};
use model::display::safe_text;
use model::json::KeyError;
use model::names::check_name;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// The least length of a secret, in bytes.
pub const SECRET_BYTES_MIN: usize = 16;

/// The longest title of a change that is kept, in bytes.
const TITLE_BYTES_MAX: usize = 200;

/// How many changes wait at most, if open ones are among them.
const WAITING_MAX: usize = 32;

/// Of so many commits some may be missing in a push.
const COMMITS_MAX: usize = 20;

/// The file of `--webhooks`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookFile {
    #[serde(default)]
    pub webhook: Vec<Webhook>,
}

/// A webhook that is taken.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Webhook {
    /// The last part of its path.
    pub name: String,
    /// The file with the secret that the forge signs with.
    pub secret_file: PathBuf,
    /// The branch that says what is wanted.
    pub branch: String,
    /// Beginnings of paths. A push that changes no such file is left alone; without any: none is.
    #[serde(default)]
    pub paths: Vec<String>,
    /// The words of the command that fetches groups and environments, and prints them.
    pub fetch: Vec<String>,
    /// The user that runs it.
    pub user: String,
    /// The words of the command that is told what came of it; none if nobody is.
    #[serde(default)]
    pub status: Vec<String>,
}

impl WebhookFile {
    /// Reads the file.
    ///
    /// # Errors
    ///
    /// Says what is wrong, and where.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        file.check().map_err(|error| error.to_string())?;
        Ok(file)
    }

    fn check(&self) -> Result<(), KeyError> {
        for (index, webhook) in self.webhook.iter().enumerate() {
            let at = |key: &str| format!("webhook[{index}].{key}");
            check_name(&webhook.name).map_err(|problem| KeyError::new(&at("name"), problem))?;
            if self.webhook[..index].iter().any(|other| other.name == webhook.name) {
                return Err(KeyError::new(&at("name"), "is there twice"));
            }
            let empty = [
                ("branch", webhook.branch.is_empty()),
                ("fetch", webhook.fetch.is_empty()),
                ("user", webhook.user.is_empty()),
            ];
            if let Some((key, _)) = empty.into_iter().find(|(_, is_empty)| *is_empty) {
                return Err(KeyError::new(&at(key), "is empty"));
            }
        }
        Ok(())
    }
}

/// True if `signature`, as of `X-Hub-Signature-256`, is that of the body. Takes the same time for
/// all signatures.
#[must_use]
pub fn is_signed(secret: &[u8], body: &[u8], signature: &str) -> bool {
    let hex = signature.strip_prefix("sha256=");
    let bytes = hex.and_then(|hex| HEXLOWER.decode(hex.as_bytes()).ok());
    let (Some(bytes), Ok(mut mac)) = (bytes, Hmac::<Sha256>::new_from_slice(secret)) else {
        return false;
    };
    mac.update(body);
    mac.verify_slice(&bytes).is_ok()
}

/// What a webhook asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Requested {
    /// Nothing, and why.
    Nothing(String),
    /// To say what an open change would do, or to carry out what the branch says now.
    Change(Change),
}

/// A change of the files in a forge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The branch that it is for.
    pub branch: String,
    /// The commit that has it, in hexadecimal.
    pub commit: String,
    /// The number of the open change; `None` if it is on the branch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
    pub title: String,
}

/// The changes that wait to be planned or carried out, each with the name of its webhook.
#[derive(Clone, Debug, Default)]
pub struct Queue(Vec<(String, Change)>);

impl Queue {
    /// Adds a change after those that wait. It replaces one of the webhook with the same number,
    /// and for the branch the one that waits. Returns false if too many open changes wait.
    #[must_use]
    pub fn add(&mut self, webhook: &str, change: Change) -> bool {
        let is_full = change.number.is_some() && self.0.len() >= WAITING_MAX;
        let mut waiting = self.0.iter_mut();
        match waiting.find(|(name, one)| name == webhook && one.number == change.number) {
            Some((_, former)) => *former = change,
            None if is_full => return false,
            None => self.0.push((webhook.to_owned(), change)),
        }
        true
    }

    /// Takes the next one. What is on a branch comes first.
    pub fn take(&mut self) -> Option<(String, Change)> {
        let first = self.0.iter().position(|(_, change)| change.number.is_none());
        (!self.0.is_empty()).then(|| self.0.remove(first.unwrap_or(0)))
    }
}

/// Returns what a webhook asks for. `event` is the header `X-GitHub-Event`.
///
/// # Errors
///
/// Says what is wrong with the body.
pub fn requested(webhook: &Webhook, event: &str, body: &[u8]) -> Result<Requested, String> {
    let wrong = |error: serde_json::Error| format!("the body is not as expected: {error}");
    match event {
        "push" => push(webhook, serde_json::from_slice(body).map_err(wrong)?),
        "pull_request" => open_change(webhook, serde_json::from_slice(body).map_err(wrong)?),
        _ => Ok(Requested::Nothing("nothing is done about such events".to_owned())),
    }
}

#[derive(Deserialize)]
struct Push {
    #[serde(rename = "ref")]
    reference: String,
    after: String,
    #[serde(default)]
    commits: Vec<Commit>,
    /// How many there are, of forges that leave some out.
    #[serde(default)]
    total_commits: Option<usize>,
    /// True if the branch was moved to another history.
    #[serde(default)]
    forced: bool,
}

#[derive(Deserialize)]
struct Commit {
    #[serde(default)]
    message: String,
    #[serde(default)]
    added: Vec<String>,
    #[serde(default)]
    removed: Vec<String>,
    #[serde(default)]
    modified: Vec<String>,
}

fn push(webhook: &Webhook, push: Push) -> Result<Requested, String> {
    if push.reference.strip_prefix("refs/heads/") != Some(&webhook.branch) {
        return Ok(Requested::Nothing(format!("only the branch {} counts", webhook.branch)));
    }
    let commit = commit_of(push.after)?;
    if commit.bytes().all(|digit| digit == b'0') {
        return Ok(Requested::Nothing("the branch is gone".to_owned()));
    }
    let changed = push.commits.iter().flat_map(|commit| {
        commit.added.iter().chain(&commit.removed).chain(&commit.modified).map(String::as_str)
    });
    let concerns = |path: &str| webhook.paths.iter().any(|beginning| path.starts_with(beginning));
    let count = push.commits.len();
    // A forge leaves commits out if they are many.
    let are_all = (1..COMMITS_MAX).contains(&count)
        && push.total_commits.is_none_or(|total| total == count)
        && !push.forced;
    if are_all && !webhook.paths.is_empty() && !changed.into_iter().any(concerns) {
        return Ok(Requested::Nothing("no file is changed that counts".to_owned()));
    }
    let title = push.commits.last().map(|commit| commit.message.as_str()).unwrap_or_default();
    let title = safe_text(title.lines().next().unwrap_or_default(), TITLE_BYTES_MAX);
    Ok(Requested::Change(Change { branch: webhook.branch.clone(), commit, number: None, title }))
}

#[derive(Deserialize)]
struct OpenChange {
    action: String,
    number: u64,
    pull_request: PullRequest,
}

#[derive(Deserialize)]
struct PullRequest {
    #[serde(default)]
    title: String,
    base: Base,
    head: Head,
}

#[derive(Deserialize)]
struct Base {
    #[serde(rename = "ref")]
    reference: String,
}

#[derive(Deserialize)]
struct Head {
    sha: String,
}

fn open_change(webhook: &Webhook, change: OpenChange) -> Result<Requested, String> {
    let OpenChange { action, number, pull_request: PullRequest { title, base, head } } = change;
    if base.reference != webhook.branch {
        return Ok(Requested::Nothing(format!("only the branch {} counts", webhook.branch)));
    }
    if !["opened", "reopened", "synchronize", "synchronized"].contains(&action.as_str()) {
        return Ok(Requested::Nothing("its files have not changed".to_owned()));
    }
    let (branch, commit) = (base.reference, commit_of(head.sha)?);
    let title = safe_text(&title, TITLE_BYTES_MAX);
    Ok(Requested::Change(Change { branch, commit, number: Some(number), title }))
}

/// Checks that a commit is named by its hash: commands get it as a word.
fn commit_of(hash: String) -> Result<String, String> {
    let is_hash = (40..=64).contains(&hash.len())
        && hash.bytes().all(|digit| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit));
    if is_hash { Ok(hash) } else { Err("a commit is not named by its hash".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        [[webhook]]
        name = "fleet"
        secret_file = "/etc/dominator/fleet.secret"
        branch = "main"
        paths = ["fleet/"]
        fetch = ["/usr/local/bin/fetch"]
        user = "fetcher"
    "#;

    /// Returns the beginning of a line.
    fn begin(text: &str) -> String {
        text.chars().take(70).chain(['\n']).collect()
    }

    fn webhook() -> Webhook {
        WebhookFile::parse(FILE).unwrap().webhook.remove(0)
    }

    #[test]
    fn signatures_are_those_of_the_standard() {
        // From the documents of GitHub about webhooks.
        let secret = b"It's a Secret to Everybody";
        let good = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
        assert!(is_signed(secret, b"Hello, World!", good));
        let bad = ["", "sha256=", &good[7..], &good.replace('7', "8"), &good[..69], "sha256=+1"];
        for signature in bad {
            assert!(!is_signed(secret, b"Hello, World!", signature), "{signature}");
        }
        assert!(!is_signed(secret, b"Hello, World", good));
        assert!(!is_signed(b"another secret, longer", b"Hello, World!", good));
    }

    #[test]
    fn a_file_that_cannot_be_is_refused() {
        let said = |from: &str, to: &str| match WebhookFile::parse(&FILE.replace(from, to)) {
            Ok(file) => format!("{} webhooks\n", file.webhook.len()),
            Err(error) => begin(error.lines().last().unwrap()),
        };
        let lines = [
            said("", ""),
            said("\"fleet\"", "\"a b\""),
            said("\"main\"", "\"\""),
            said("[\"/usr/local/bin/fetch\"]", "[]"),
            said("user =", "usr ="),
            begin(&WebhookFile::parse(&FILE.repeat(2)).unwrap_err()),
        ];
        expect_test::expect![[r#"
            1 webhooks
            webhook[0].name: `a b` is no name: expected up to 64 letters, digits, 
            webhook[0].branch: is empty
            webhook[0].fetch: is empty
            unknown field `usr`, expected one of `name`, `secret_file`, `branch`, 
            webhook[1].name: is there twice
        "#]]
        .assert_eq(&lines.concat());
    }

    #[test]
    fn pushes_and_open_changes_are_told_apart() {
        let hash = "0123456789abcdef0123456789abcdef01234567";
        let said = |event: &str, body: serde_json::Value| match requested(
            &webhook(),
            event,
            body.to_string().as_bytes(),
        ) {
            Ok(Requested::Nothing(why)) => format!("nothing: {why}\n"),
            Ok(Requested::Change(Change { commit, number, title, .. })) => {
                format!("{}: {number:?} {title}\n", &commit[..4])
            }
            Err(error) => begin(&format!("error: {error}")),
        };
        let push = |branch: &str, after: &str, paths: &[&str]| {
            let commits = match paths {
                [] => serde_json::json!([]),
                paths => serde_json::json!([{"message": "New\nrelease", "modified": paths}]),
            };
            let reference = format!("refs/heads/{branch}");
            said("push", serde_json::json!({"ref": reference, "after": after, "commits": commits}))
        };
        let many = |more: serde_json::Value| {
            let mut push = serde_json::json!({"ref": "refs/heads/main", "after": hash,
                "commits": [{"message": "more", "modified": ["README"]}]});
            push.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            said("push", push)
        };
        let open = |action: &str, base: &str, sha: &str| {
            let body = serde_json::json!({"action": action, "number": 7, "pull_request":
                {"title": "web 9", "base": {"ref": base}, "head": {"sha": sha}}});
            said("pull_request", body)
        };
        let lines = [
            push("main", hash, &["fleet/web.json", "README"]),
            push("main", hash, &["README"]),
            push("main", hash, &[]),
            many(serde_json::json!({"total_commits": 2})),
            many(serde_json::json!({"total_commits": 1, "forced": true})),
            many(serde_json::json!({"total_commits": 1})),
            push("other", hash, &["fleet/web.json"]),
            push("main", &"0".repeat(40), &[]),
            push("main", "--upload-pack=evil", &[]),
            open("opened", "main", hash),
            open("closed", "main", hash),
            open("synchronize", "other", hash),
            open("opened", "main", "HEAD"),
            said("ping", serde_json::json!({})),
            said("push", serde_json::json!({"ref": 1})),
        ];
        expect_test::expect![[r#"
            0123: None New
            nothing: no file is changed that counts
            0123: None 
            0123: None more
            0123: None more
            nothing: no file is changed that counts
            nothing: only the branch main counts
            nothing: the branch is gone
            error: a commit is not named by its hash
            0123: Some(7) web 9
            nothing: its files have not changed
            nothing: only the branch main counts
            error: a commit is not named by its hash
            nothing: nothing is done about such events
            error: the body is not as expected: invalid type: integer `1`, expecte
        "#]]
        .assert_eq(&lines.concat());
    }

    #[test]
    fn a_newer_change_replaces_the_one_that_waits_and_branches_come_first() {
        let mut queue = Queue::default();
        let change = |number: Option<u64>, title: &str| Change {
            branch: "main".to_owned(),
            commit: String::new(),
            number,
            title: title.to_owned(),
        };
        let added = [
            queue.add("fleet", change(Some(7), "seven")),
            queue.add("other", change(Some(7), "another")),
            queue.add("fleet", change(Some(7), "seven anew")),
            queue.add("fleet", change(None, "merged")),
            queue.add("fleet", change(None, "merged later")),
        ];
        assert_eq!(added, [true; 5]);
        let fill = (10..100).filter(|number| queue.add("fleet", change(Some(*number), "more")));
        assert_eq!(fill.count(), WAITING_MAX - 3);
        assert!(queue.add("other", change(None, "a branch never waits for open changes")));
        let next = std::iter::from_fn(|| queue.take()).take(5);
        let titles: Vec<String> = next.map(|(name, one)| format!("{name} {}", one.title)).collect();
        let expected = [
            "fleet merged later",
            "other a branch never waits for open changes",
            "fleet seven anew",
            "other another",
            "fleet more",
        ];
        assert_eq!(titles, expected);
    }
}
