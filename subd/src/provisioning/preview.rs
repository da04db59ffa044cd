//! Asks plugins what they would do for an image that is not there yet.

use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::subd::PlanResourcesReply;
use daemon::plugins::program;
use provisioning::binding::Bindings;
use provisioning::image::Definition;
use provisioning::machine::KeptPlugin;
use provisioning::plan::Provision;
use provisioning::protocol::PlanAnswer;
use tokio::time::Instant;

use crate::provisioning::provisioner::{Provisioner, TIMEOUT_S};

/// How long all plugins together may take to say what they would do.
const ASKING_MAX: Duration = Duration::from_secs(240);

impl Provisioner {
    /// Asks what would be done for an image with `definition`.
    ///
    /// # Errors
    ///
    /// `Busy` while somebody else asks.
    pub async fn preview(&self, definition: &Definition) -> Result<PlanResourcesReply, Fault> {
        // A specification may name commands, also to ask. Nobody has signed this one.
        if !self.plugins.uses_installed {
            let why = "the machine has trusted keys, and what its plugins would be asked about is \
                       not signed";
            return Ok(PlanResourcesReply { unknown: Some(why.to_owned()), ..<_>::default() });
        }
        let Ok(_turn) = self.previewing.try_lock() else {
            let text = "the machine asks its plugins for somebody else";
            return Err(Fault::new(FaultCode::Busy, text));
        };
        let preview = match self.machine(|machine| machine.preview(definition, &self.name)) {
            Ok(preview) => preview,
            Err(why) => return Ok(PlanResourcesReply { unknown: Some(why), ..<_>::default() }),
        };
        // Files that plugins look at may be those of both images.
        let update = (self.surroundings.last_update)();
        let end = Instant::now() + ASKING_MAX;
        let mut answers = Vec::new();
        for call in &preview.calls {
            let answer =
                tokio::time::timeout_at(end, self.answer(definition, &preview.bindings, call));
            let late =
                |_| Err("its plugin was not asked to the end, because it took too long".into());
            tokio::select! {
                answer = answer => answers.push(answer.unwrap_or_else(late)),
                () = self.stop.cancelled() => {
                    return Err(Fault::new(FaultCode::Unavailable, "subd is stopping"));
                }
            }
        }
        if update.is_none() || update != (self.surroundings.last_update)() {
            let why = "an update was carried out meanwhile".to_owned();
            return Ok(PlanResourcesReply { unknown: Some(why), ..<_>::default() });
        }
        Ok(PlanResourcesReply { resources: preview.planned(answers), unknown: None })
    }

    async fn answer(
        &self,
        definition: &Definition,
        bindings: &Bindings,
        call: &Provision,
    ) -> Result<PlanAnswer, String> {
        // It may copy an installed plugin.
        let plugin = tokio::task::block_in_place(|| self.plugin_for(definition, bindings, call))?;
        self.ask_plugin(&plugin, call).await
    }

    /// Returns the plugin that the machine would use, if it is there already.
    fn plugin_for(
        &self,
        definition: &Definition,
        bindings: &Bindings,
        call: &Provision,
    ) -> Result<KeptPlugin, String> {
        let name = &call.provisioner;
        let kept = self.machine(|machine| machine.kept(name).cloned());
        if let Some(kept) = kept.filter(|_| call.destroys()) {
            return Ok(kept);
        }
        let copy = match definition.plugins.get(name) {
            Some(brought) => brought.to_string(),
            None => self.plugins.keep_installed(name)?,
        };
        if !self.plugins.has(&copy) {
            let program = program(name);
            return Err(format!(
                "{program} comes with the image: the machine does not have it yet"
            ));
        }
        let timeout_s = bindings.of_name(name).map_or(TIMEOUT_S, |binding| binding.timeout_s);
        Ok(KeptPlugin { copy, timeout_s })
    }
}
