//! The files that machines of a plan keep with old numbers of users and groups.

use api::dominator::kept_files::{
    COUNTING_MAX, CountKeptFiles, CountKeptFilesRequest, ImageOfMachine, KeptFiles,
};
use model::display::counted;
use rpc::client::Client;
use serde::Serialize;

use super::ask_machines;

/// What the machines of a plan keep.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct KeptByMachines {
    /// Machines with old numbers, or of which that is not known.
    pub(super) machines: Vec<KeptFiles>,
    /// Why nothing is known of further machines.
    pub(super) unknown: Option<String>,
}

impl KeptByMachines {
    /// Formats it for people: of the first machines, unless `named` is `None`.
    pub(super) fn lines(&self, named: Option<usize>) -> Vec<String> {
        let all: Vec<Vec<String>> = self.machines.iter().map(KeptFiles::lines).collect();
        let told: Vec<&Vec<String>> = all.iter().filter(|lines| !lines.is_empty()).collect();
        let shown = named.unwrap_or(told.len()).min(told.len());
        let mut lines: Vec<String> = told[..shown].iter().copied().flatten().cloned().collect();
        let more = (told.len() - shown) as u64;
        if more > 0 {
            let machines = counted(more, "machine");
            lines.push(format!("kept files of {machines} more: --verbose names them"));
        }
        let unknown = self.unknown.as_ref();
        lines.extend(unknown.map(|why| {
            format!("NOT KNOWN: how many kept files have old numbers of users and groups: {why}")
        }));
        lines
    }
}

/// Has the dominator ask `machines`. A plan is shown without what they keep if that is not known.
pub(super) async fn ask(client: &Client, machines: &[ImageOfMachine]) -> KeptByMachines {
    let mut kept = KeptByMachines::default();
    kept.unknown = ask_machines::<CountKeptFiles>(
        client,
        machines.chunks(COUNTING_MAX),
        "files that machines keep are counted",
        |machines| CountKeptFilesRequest { machines },
        |reply| kept.machines.extend(reply.machines),
    )
    .await;
    kept
}

#[cfg(test)]
mod tests {
    use api::dominator::kept_files::KeptNumber;
    use model::accounts::AccountKind;
    use model::image::ImageName;

    use super::*;

    #[test]
    fn the_first_machines_are_named_and_all_if_that_is_asked_for() {
        let machine = |hostname: &str, files| KeptFiles {
            hostname: hostname.to_owned(),
            from: ImageName::new("base/1").unwrap(),
            image: ImageName::new("base/2").unwrap(),
            numbers: vec![KeptNumber {
                kind: AccountKind::User,
                number: 105,
                former: "postfix".to_owned(),
                now: Some("redis".to_owned()),
                files: Some(files),
            }],
            unfinished: None,
            unknown: None,
        };
        let machines = vec![machine("a", 1_204), machine("b", 0), machine("c", 2), machine("d", 3)];
        let kept = KeptByMachines { machines, unknown: Some("refused".to_owned()) };
        let line = |hostname, count| {
            format!(
                "{hostname}: {count} kept files have UID 105, which is postfix in base/1 and redis \
                 in base/2"
            )
        };
        let unknown =
            "NOT KNOWN: how many kept files have old numbers of users and groups: refused";
        let all = [&line("a", "1,204"), &line("c", "2"), &line("d", "3"), unknown];
        assert_eq!(kept.lines(None), all);
        let more = "kept files of 2 machines more: --verbose names them";
        assert_eq!(kept.lines(Some(1)), [&line("a", "1,204"), more, unknown]);
        assert_eq!(KeptByMachines::default().lines(Some(1)), Vec::<String>::new());
    }
}
