//! The content of computed files for a plan that is only shown.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::file_generator::{Generate, GenerateRequest, GeneratedFile, WantedFiles};
use model::display::{error_chain, safe_text};
use model::filter::Patterns;
use model::image::ComputedRule;
use model::image::computed::{ComputedFile, ComputedFiles};
use model::image::required::RequiredImage;
use model::mdb::Machine;

use super::{AskError, ComputedService, WHY_BYTES_MAX};

/// How long it may take to make the files of one machine for a plan that is only shown.
const PREVIEW_LIMIT: Duration = Duration::from_secs(30);

impl ComputedService {
    /// Returns the content that the computed files of `image` would have on a machine with this
    /// record, and why the rest is not known. Paths that the machine excludes are left out. Stores
    /// nothing.
    pub async fn preview(
        &self,
        machine: &Machine,
        image: &RequiredImage,
        exclusions: &Patterns,
    ) -> (ComputedFiles, Vec<String>) {
        let mut by_source: BTreeMap<&str, Vec<&ComputedRule>> = BTreeMap::new();
        for rule in image.content.computed.iter().filter(|rule| !exclusions.covers(&rule.path)) {
            by_source.entry(&rule.source).or_default().push(rule);
        }
        let (mut files, mut failures) = (Vec::new(), Vec::new());
        for (source, rules) in by_source {
            let wanted = WantedFiles {
                machine: machine.clone(),
                algorithm: image.tree.algorithm(),
                paths: rules.iter().map(|rule| rule.path.clone()).collect(),
                key: self.locked().table.key(&machine.hostname).cloned(),
                outputs: self.locked().table.outputs(&machine.hostname).to_owned(),
            };
            let request = GenerateRequest { machines: vec![wanted], is_for_use: false };
            let made = match self.client(source) {
                Ok(client) => {
                    let reply = client.call_within::<Generate>(&request, PREVIEW_LIMIT).await;
                    reply.map_err(|error| error_chain(&error))
                }
                Err(error) => Err(error.to_string()),
            };
            let all_failed = |why| vec![GeneratedFile::Failed(why); rules.len()];
            let made = match made {
                Ok(reply) => match reply.machines.into_iter().next() {
                    Some(made) if made.len() == rules.len() => made,
                    _ => all_failed(AskError::Count.to_string()),
                },
                Err(why) => all_failed(why),
            };
            for (rule, made) in rules.into_iter().zip(made) {
                match made {
                    GeneratedFile::Made(content) => files.push(ComputedFile {
                        rule: Arc::new(rule.clone()),
                        object: content.id.into(),
                        size_bytes: content.size_bytes.into(),
                        since: self.clock.now().wall,
                    }),
                    GeneratedFile::Failed(why) => match self.known_of_now(machine, image, rule) {
                        Some(file) => files.push(file),
                        None => {
                            let why = safe_text(&why, WHY_BYTES_MAX);
                            failures.push(format!("{} from {}: {why}", rule.path, rule.source));
                        }
                    },
                }
            }
        }
        (ComputedFiles::new(files), failures)
    }

    /// Returns the file that the machine with this record has to have now, if that is known.
    fn known_of_now(
        &self,
        machine: &Machine,
        image: &RequiredImage,
        rule: &ComputedRule,
    ) -> Option<ComputedFile> {
        let inner = self.locked();
        if !inner.table.has_record(machine) {
            return None;
        }
        let known = inner.table.known(&machine.hostname);
        let file = known.files.get(&rule.path, &rule.source)?;
        let is_of_now = known.unknown.iter().all(|unknown| *unknown.rule != *rule)
            && file.object.id().algorithm() == image.tree.algorithm();
        is_of_now.then(|| file.clone())
    }
}
