//! Triggers as text and as files, and merging several files.
// tidy: core

use std::collections::BTreeMap;

use model::filter::{PatternError, Patterns};
use model::trigger::{Kind, Trigger, Triggers};
use serde::Serialize;

/// Describes a trigger on one line: `ssh (reload, high impact): /etc/ssh/.* /usr/sbin/sshd$`.
pub fn trigger_text(trigger: &Trigger) -> String {
    let impact = if trigger.high_impact { ", high impact" } else { "" };
    let patterns = trigger.match_lines.lines().join(" ");
    format!("{} ({}{impact}): {patterns}", trigger.service, action(trigger))
}

/// Returns the effect of a trigger on its service.
pub fn action(trigger: &Trigger) -> &'static str {
    match (trigger.reboots(), trigger.do_reload) {
        (true, _) => "reboot",
        (false, true) => "reload",
        (false, false) => "restart",
    }
}

/// A trigger in a file, without fields that are not set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
struct TriggerRecord<'triggers> {
    match_lines: &'triggers [String],
    service: &'triggers str,
    #[serde(skip_serializing_if = "str::is_empty")]
    sort_name: &'triggers str,
    #[serde(skip_serializing_if = "is_false")]
    do_reload: bool,
    #[serde(skip_serializing_if = "is_false")]
    do_reboot: bool,
    #[serde(skip_serializing_if = "is_false")]
    high_impact: bool,
    #[serde(skip_serializing_if = "is_service")]
    kind: Kind,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_false(flag: &bool) -> bool {
    !flag
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_service(kind: &Kind) -> bool {
    *kind == Kind::Service
}

/// Returns the text of a trigger file.
pub fn to_text(triggers: &Triggers) -> String {
    let records: Vec<TriggerRecord<'_>> = triggers
        .0
        .iter()
        .map(|trigger| TriggerRecord {
            match_lines: trigger.match_lines.lines(),
            service: &trigger.service,
            sort_name: &trigger.sort_name,
            do_reload: trigger.do_reload,
            do_reboot: trigger.do_reboot,
            high_impact: trigger.high_impact,
            kind: trigger.kind,
        })
        .collect();
    serde_json::to_string_pretty(&records).expect("triggers can be encoded") + "\n"
}

/// Merges lists of triggers. Triggers that differ only in their match lines become one, with all
/// lines, sorted. Other triggers stay separate, because they have different effects. The result
/// fires for a path exactly if one of the lists does, with the same effect. Sorted by service, then
/// sort name, then flags: equal sets give equal files.
///
/// # Errors
///
/// [`PatternError`] if the lines of one trigger are too many together.
pub fn merge(lists: &[Triggers]) -> Result<Triggers, PatternError> {
    type Key = (String, String, bool, bool, bool, Kind);
    let mut merged: BTreeMap<Key, Vec<String>> = BTreeMap::new();
    for trigger in lists.iter().flat_map(|list| &list.0) {
        let Trigger { service, sort_name, do_reload, do_reboot, high_impact, kind, .. } = trigger;
        let names = (service.clone(), sort_name.clone());
        let key = (names.0, names.1, *do_reload, *do_reboot, *high_impact, *kind);
        merged.entry(key).or_default().extend(trigger.match_lines.lines().iter().cloned());
    }
    let triggers = merged.into_iter().map(|(key, mut lines)| {
        let (service, sort_name, do_reload, do_reboot, high_impact, kind) = key;
        lines.sort();
        lines.dedup();
        let match_lines = Patterns::new(lines)?;
        Ok(Trigger { match_lines, service, sort_name, do_reload, do_reboot, high_impact, kind })
    });
    triggers.collect::<Result<Vec<Trigger>, PatternError>>().map(Triggers)
}

/// A trigger that a path fires.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Match {
    /// Number of the trigger in the file, from 1.
    pub number: usize,
    pub service: String,
    /// `restart`, `reload` or `reboot`.
    pub action: &'static str,
    /// Its matching lines.
    pub lines: Vec<String>,
}

/// Returns the triggers that a change of `path` fires, in the order of the file.
pub fn matches(
    triggers: &Triggers,
    path: &model::path::TreePath,
) -> Result<Vec<Match>, PatternError> {
    let mut all = Vec::new();
    for (index, trigger) in triggers.0.iter().enumerate() {
        if !trigger.fires_on(path) {
            continue;
        }
        let mut lines = Vec::new();
        for line in trigger.match_lines.lines() {
            if Patterns::new([line])?.matches(path) {
                lines.push(line.clone());
            }
        }
        let service = trigger.service.clone();
        all.push(Match { number: index + 1, service, action: action(trigger), lines });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    fn read(text: &str) -> Triggers {
        Triggers::from_json(text).unwrap()
    }

    #[test]
    fn triggers_of_one_kind_become_one_and_others_stay_apart() {
        let one = read(
            r#"[{"MatchLines": ["/b", "/a"], "Service": "web", "DoReload": true},
                {"MatchLines": ["/usr/sbin/web"], "Service": "web"},
                {"MatchLines": ["/boot/.*"], "Service": "reboot"}]"#,
        );
        let other = read(
            r#"[{"MatchLines": ["/c", "/a"], "Service": "web", "DoReload": true},
                {"MatchLines": ["/usr/sbin/web"], "Service": "web", "HighImpact": true},
                {"MatchLines": ["/x"], "Service": "a", "SortName": "z9"}]"#,
        );
        let merged = merge(&[one.clone(), other.clone()]).unwrap();
        let lines: Vec<String> = merged.0.iter().map(trigger_text).collect();
        assert_eq!(
            lines,
            [
                "a (restart): /x",
                "reboot (reboot): /boot/.*",
                "web (restart): /usr/sbin/web",
                "web (restart, high impact): /usr/sbin/web",
                "web (reload): /a /b /c",
            ]
        );
        // The order of the files, and merging again, change nothing.
        assert_eq!(merge(&[other, one]).unwrap(), merged);
        assert_eq!(merge(&[merged.clone(), merged.clone()]).unwrap(), merged);
        assert_eq!(read(&to_text(&merged)), merged);
        let text = to_text(&Triggers(merged.0[..1].to_vec()));
        expect![[r#"
            [
              {
                "MatchLines": [
                  "/x"
                ],
                "Service": "a",
                "SortName": "z9"
              }
            ]
        "#]]
        .assert_eq(&text);
    }

    #[test]
    fn a_path_is_matched_by_lines_that_are_named() {
        let triggers = read(
            r#"[{"MatchLines": ["/etc/.*", "/etc/ssh"], "Service": "ssh"},
                {"MatchLines": ["/boot"], "Service": "reboot"}]"#,
        );
        let path = |text: &str| text.parse().unwrap();
        let found = matches(&triggers, &path("/etc/ssh/sshd_config")).unwrap();
        let lines = vec!["/etc/.*".to_owned(), "/etc/ssh".to_owned()];
        let want = Match { number: 1, service: "ssh".to_owned(), action: "restart", lines };
        assert_eq!(found, [want]);
        assert_eq!(matches(&triggers, &path("/srv")).unwrap(), []);
    }
}
