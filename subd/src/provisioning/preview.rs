//! Asks plugins what they would do for an image that is not there yet.

use api::fault::{Fault, FaultCode};
use api::subd::PlanResourcesReply;
use daemon::plugins::program;
use provisioning::image::Definition;
use provisioning::machine::KeptPlugin;
use provisioning::plan::Provision;

use crate::provisioning::provisioner::{Provisioner, TIMEOUT_S};

impl Provisioner {
    /// Asks what would be done for an image with `definition`.
    ///
    /// # Errors
    ///
    /// `Busy` while somebody else asks.
    pub async fn preview(&self, definition: &Definition) -> Result<PlanResourcesReply, Fault> {
        let Ok(_turn) = self.previewing.try_lock() else {
            let text = "the machine asks its plugins for somebody else";
            return Err(Fault::new(FaultCode::Busy, text));
        };
        let preview = match self.machine(|machine| machine.preview(definition, &self.name)) {
            Ok(preview) => preview,
            Err(why) => return Ok(PlanResourcesReply { unknown: Some(why), ..<_>::default() }),
        };
        let mut answers = Vec::new();
        for call in &preview.calls {
            answers.push(match self.plugin_for(definition, call) {
                Ok(plugin) => self.ask_plugin(&plugin, call).await,
                Err(why) => Err(why),
            });
        }
        Ok(PlanResourcesReply { resources: preview.planned(answers), unknown: None })
    }

    /// Returns the plugin that the machine would use, if it is there already.
    fn plugin_for(&self, definition: &Definition, call: &Provision) -> Result<KeptPlugin, String> {
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
        let bindings = definition.read().map_err(|error| error.to_string())?.1;
        let timeout_s = bindings.of_name(name).map_or(TIMEOUT_S, |binding| binding.timeout_s);
        Ok(KeptPlugin { copy, timeout_s })
    }
}
