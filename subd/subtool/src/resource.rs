//! `subtool resource`: the resources of a machine.

use api::subd::{
    ContinueProvisioning, ContinueProvisioningRequest, GetResources, GetResourcesRequest,
    OrderResource, OrderResourceRequest, Provision, ProvisionRequest, ProvisioningReport,
    ProvisioningStage, ResourceOrder, ResourcesReport,
};
use clap::{Args, Subcommand};
use model::object::ObjectId;
use rpc::client::CallError;
use tool::{Format, Output};

use super::error::ToolError;
use super::machine::Machine;
use super::progress::Progress;

/// What is asked of resources.
#[derive(Debug, Subcommand)]
pub enum ResourceCommand {
    /// List the resources, how they are, and how far those of an image are that is to come
    List,
    /// Have the machine forget an orphan, which stays as it is
    Forget(OrphanArguments),
    /// Have the machine destroy an orphan, with the plugin that made it
    Destroy(OrphanArguments),
}

#[derive(Debug, Args)]
pub struct OrphanArguments {
    /// The resource
    id: String,
    /// Why, for the audit log
    #[arg(long, value_name = "TEXT")]
    why: String,
}

/// Carries the command out.
pub(super) async fn run(
    machine: &Machine,
    format: Format,
    command: &ResourceCommand,
) -> Result<Output, ToolError> {
    let order = match command {
        ResourceCommand::List => None,
        ResourceCommand::Forget(orphan) => Some((orphan, ResourceOrder::Forget)),
        ResourceCommand::Destroy(orphan) => Some((orphan, ResourceOrder::Destroy)),
    };
    if let Some((OrphanArguments { id, why }, order)) = order {
        let request = OrderResourceRequest { id: id.clone(), order, why: why.clone() };
        let done = machine.call::<OrderResource>(&request).await?;
        return Ok(format.render(&done, |_| String::new()).into());
    }
    let report = report(machine).await?;
    if let Some(why) = &report.not_run {
        eprintln!("note: this machine does not provision: {why}");
    }
    Ok(format.render(&report, list).into())
}

async fn report(machine: &Machine) -> Result<ResourcesReport, CallError> {
    let reply = machine.call::<GetResources>(&GetResourcesRequest::default()).await?;
    Ok(reply.report.unwrap_or_default())
}

/// Has the machine provision what the staged update to an image needs, and waits for the end of all
/// waves. What has failed before is tried once more.
pub(super) async fn provision(
    machine: &Machine,
    image_digest: ObjectId,
    update_id: u64,
    progress: &mut Progress,
) -> Result<(), ToolError> {
    progress.stage("Provisioning.");
    let of_image =
        |report: ResourcesReport| report.provisioning.filter(|of| of.image_digest == image_digest);
    let go_on = async |step| {
        let request = ContinueProvisioningRequest { image_digest, step };
        machine.call::<ContinueProvisioning>(&request).await
    };
    let former = of_image(report(machine).await?);
    machine.call::<Provision>(&ProvisionRequest { update_id }).await?;
    if let Some(ProvisioningReport { stage: ProvisioningStage::Failed { .. }, step, .. }) = former {
        go_on(step).await?;
    }
    loop {
        let before = machine.poll().await?.version;
        let Some(now) = of_image(report(machine).await?) else {
            let text = "the machine was told to provision another image meanwhile";
            return Err(ToolError::Refused(text.to_owned()));
        };
        match now.stage {
            ProvisioningStage::Finished => return Ok(()),
            ProvisioningStage::Failed { error } => {
                let text = format!("the resources of the image are not there: {error}");
                return Err(ToolError::Refused(text));
            }
            ProvisioningStage::Waits { .. } => drop(go_on(now.step).await?),
            ProvisioningStage::Running { .. } => {
                let what = "plugins still work on resources";
                machine.wait_until(what, |_| (), |reply| reply.version != before).await?;
            }
            ProvisioningStage::Awaits { text } => {
                let what = format!("a dominator has to say who makes it: {text}");
                machine.wait_until(&what, |_| (), |reply| reply.version != before).await?;
            }
        }
    }
}

fn list(report: &ResourcesReport) -> String {
    let mut text = report.provisioning.as_ref().map(progress).unwrap_or_default();
    let titles = ["ID", "KIND", "STATE", "BY", "WHY"].map(str::to_owned);
    let lines = report.resources.iter().map(|one| {
        let orphan = if one.is_orphan { "orphan: " } else { "" };
        [
            one.id.clone(),
            one.kind.clone(),
            one.state.name().to_owned(),
            one.provisioner.clone(),
            format!("{orphan}{}", one.text),
        ]
    });
    let lines: Vec<[String; 5]> = std::iter::once(titles).chain(lines).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let [id, kind, state, by] = [0, 1, 2, 3].map(|column| width(column).unwrap_or_default());
    for [a, b, c, d, why] in &lines {
        let line = format!("{a:id$}  {b:kind$}  {c:state$}  {d:by$}  {why}");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn progress(of: &ProvisioningReport) -> String {
    let how = match &of.stage {
        ProvisioningStage::Running { wave: 0, .. } => {
            "plugins still work for a former image".to_owned()
        }
        ProvisioningStage::Running { wave, waves } => format!("wave {wave} of {waves} runs"),
        ProvisioningStage::Waits { wave, waves } => {
            format!("wave {wave} of {waves} waits for the dominator")
        }
        ProvisioningStage::Finished => "all are as asked for".to_owned(),
        ProvisioningStage::Failed { error } => format!("failed: {error}"),
        ProvisioningStage::Awaits { text } => text.clone(),
    };
    format!("{}: {how}\n\n", of.image)
}
