//! Each command of subtool.

use rpc::tls::Security;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use api::fault::FaultCode;
use api::object_server::IDS_MAX;
use api::planning::preview::{FormerImage, Preview};
use api::subd::{
    Activity, CheckHealth, Cleanup, CleanupRequest, Configuration, ForgetIssued,
    ForgetIssuedRequest, GetConfiguration, GetLimits, GetLimitsReply, Health, POLL_WAIT_MS_MAX,
    Pause, Paused, Poll, PollReply, PollRequest, Resume, RetryTriggers, ScanNow, ScanNowRequest,
    SetConfiguration, SetConfigurationRequest, TakeOver, TakeOverRequest,
};
use daemon::{EXIT_DONE, EXIT_FAILED, EXIT_PARTLY, IMAGESERVER_PORT, SUBD_PORT};
use model::display::{counted, error_chain, size, utc};
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::path::TreePath;
use model::time_parse;
use model::tree::text::to_text;
use model::tree::{Leaf, Node, Time};
use rpc::client::{Client, Peer};
use rpc::trees::TreeReader;
use serde::Serialize;
use system::clock::wall;
use tool::{EXIT_DIFFERENT, Format, Output, json};

use super::error::ToolError;
use super::machine::Machine;
use super::progress::Progress;
use super::push::{Order, Report, push};
use super::rows::{Rows, cached_objects, configuration_rows, health_text, poll_rows};
use super::{Arguments, Command, LimitArgs, PauseArgs, file};

/// How often counters are polled, which do not wake a poll.
const COUNTER_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The inputs of the commands.
struct Session<'a> {
    arguments: &'a Arguments,
    machine: Machine,
    reader: Arc<TreeReader>,
    images: Client,
}

/// What was set, and which limits hold.
#[derive(Serialize)]
struct ShownConfiguration {
    #[serde(flatten)]
    configuration: Configuration,
    in_force: Option<GetLimitsReply>,
}

/// Carries the command out.
pub(super) async fn run(arguments: &Arguments, security: &Security) -> Result<Output, ToolError> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let reader = Arc::new(TreeReader::new(processors));
    let client = Client::new(Peer::parse(&arguments.subd, SUBD_PORT)?, security);
    let images = Client::new(Peer::parse(&arguments.imageserver, IMAGESERVER_PORT)?, security);
    let machine = Machine::new(client, Arc::clone(&reader), arguments.timeout);
    let session = Session { arguments, machine, reader, images };
    let mut progress = Progress::default();
    match &arguments.command {
        Command::Poll { wait } => session.poll(*wait).await,
        Command::Scan { content, media } => session.scan(*content, *media, &mut progress).await,
        Command::Show => session.show().await,
        Command::GetConfig => session.get_config().await,
        Command::SetConfig(limits) => session.set_config(limits).await,
        Command::Pause(pause) => session.pause(pause).await,
        Command::Resume => {
            if session.machine.poll().await?.paused.is_none() {
                return Err(ToolError::NotPaused);
            }
            let done = session.machine.call::<Resume>(&()).await?;
            eprintln!("Updates go on.");
            Ok(session.data(&done, String::new).into())
        }
        Command::TakeOver { dominator } => {
            let request = TakeOverRequest { dominator: dominator.clone() };
            let reply = session.machine.call::<TakeOver>(&request).await?;
            let former = reply.former.as_deref().unwrap_or("no dominator");
            eprintln!("Until now {former} gave orders.");
            Ok(session.data(&reply, String::new).into())
        }
        Command::ForgetIssued { path, why } => session.forget_issued(path, why).await,
        Command::ShowUpdate { image } => session.show_update(image, &mut progress).await,
        Command::PushImage { image, force_unsafe, force_disruption, go_on, source } => {
            let sources = match source.as_slice() {
                [] => vec![session.images.peer().authority()],
                given => given.to_vec(),
            };
            let order = Order {
                image: session.image(image).await?,
                sources,
                force_unsafe: *force_unsafe,
                force_disruption: *force_disruption,
                go_on: *go_on,
            };
            let report = push(&session.machine, &order, &mut progress).await?;
            progress.close();
            let code = if report.is_partial() { EXIT_PARTLY } else { EXIT_DONE };
            Ok(Output { text: session.data(&report, || table(pushed(&report))), code })
        }
        Command::GetFile { path, file } => {
            file::get(&session.machine, path, file.as_deref(), &mut progress).await?;
            Ok(String::new().into())
        }
        Command::Provision(_) | Command::Documents(_) => {
            unreachable!("they are carried out before a machine is called")
        }
        Command::Cleanup { all } => session.cleanup(*all).await,
        Command::WaitForImage { image } => session.wait_for(image, &mut progress).await,
        Command::CheckHealth => session.check_health().await,
        Command::Task { task } => super::task::run(&session.machine, arguments.format, task).await,
        Command::Resource { resource } => {
            super::resource::run(&session.machine, arguments.format, resource).await
        }
        Command::RetryTriggers => session.retry_triggers(&mut progress).await,
    }
}

impl Session<'_> {
    /// Returns `value` in the requested format.
    fn data(&self, value: &impl Serialize, text: impl FnOnce() -> String) -> String {
        self.arguments.format.render(value, |_| text())
    }

    async fn image(&self, name: &ImageName) -> Result<Arc<RequiredImage>, ToolError> {
        Ok(self.reader.image(&self.images, name, Duration::ZERO).await?)
    }

    async fn poll(&self, wait: bool) -> Result<Output, ToolError> {
        let mut reply = self.machine.poll().await?;
        if wait {
            let (have, wait_ms) = (Some(reply.version), POLL_WAIT_MS_MAX);
            let limit = Duration::from_millis(u64::from(wait_ms) * 2);
            let request = PollRequest { have, wait_ms };
            self.machine.client().call_within::<Poll>(&request, limit).await?;
            reply = self.machine.poll().await?;
        }
        Ok(self.data(&reply, || table(poll_rows(&reply))).into())
    }

    async fn scan(
        &self,
        content: bool,
        media: bool,
        progress: &mut Progress,
    ) -> Result<Output, ToolError> {
        let before = self.machine.poll().await?.counters;
        self.machine.call::<ScanNow>(&ScanNowRequest { content, media }).await?;
        progress.stage("Scanning.");
        let reply = loop {
            let reply = self.machine.poll().await?;
            let now = &reply.counters;
            let is_done = now.metadata_passes > before.metadata_passes
                && (!content || now.content_passes > before.content_passes)
                && (!media || now.media_passes > before.media_passes);
            if is_done {
                break reply;
            }
            if self.machine.is_late() {
                return Err(self.machine.too_long("the passes have not come to their end"));
            }
            let hashed = now.hashed_bytes.saturating_sub(before.hashed_bytes);
            progress.show(&format!("{} hashed", size(hashed)));
            tokio::time::sleep(COUNTER_POLL_INTERVAL).await;
        };
        progress.close();
        let counters = reply.counters.clone();
        let text = || {
            let mut rows: Rows =
                vec![("hashed", size(counters.hashed_bytes.saturating_sub(before.hashed_bytes)))];
            let mut pass = |name, made: bool, took_ms: u64| {
                if made {
                    rows.push((name, format!("{took_ms} ms")));
                }
            };
            pass("metadata pass", true, counters.metadata_pass_ms);
            pass("content pass", content, counters.content_pass_ms);
            pass("media pass", media, counters.media_pass_ms);
            if let Some(scan) = &reply.scan {
                let entries = counted(scan.totals.entries, "path");
                rows.push(("tree", scan.root.to_string()));
                rows.push(("holds", format!("{entries}, {}", size(scan.totals.bytes))));
            }
            table(rows)
        };
        Ok(self.data(&reply.counters, text).into())
    }

    async fn show(&self) -> Result<Output, ToolError> {
        let (_, _, tree) = self.machine.tree().await?;
        let nodes = || tree.nodes().collect::<Vec<_>>();
        Ok(match self.arguments.format {
            Format::Table => to_text(&tree),
            Format::Json => json(&nodes()),
        }
        .into())
    }

    async fn get_config(&self) -> Result<Output, ToolError> {
        let configuration = self.machine.call::<GetConfiguration>(&()).await?;
        let limits = match self.machine.call::<GetLimits>(&()).await {
            Ok(limits) => Some(limits),
            Err(error) => match error.code() {
                Some(FaultCode::NoMethod | FaultCode::Denied) => None,
                _ => return Err(error.into()),
            },
        };
        let shown = ShownConfiguration { configuration, in_force: limits };
        let rows = || configuration_rows(&shown.configuration, shown.in_force.as_ref());
        Ok(self.data(&shown, || table(rows())).into())
    }

    async fn set_config(&self, limits: &LimitArgs) -> Result<Output, ToolError> {
        let old = self.machine.call::<GetConfiguration>(&()).await?.limits;
        let limits = Some(limits.after(old));
        let request = SetConfigurationRequest { scan: None, limits };
        self.machine.call::<SetConfiguration>(&request).await?;
        eprintln!(
            "What the machine's own configuration sets is a ceiling: a higher limit changes \
             nothing."
        );
        self.get_config().await
    }

    async fn forget_issued(&self, path: &TreePath, why: &str) -> Result<Output, ToolError> {
        let request = ForgetIssuedRequest { path: path.clone(), why: why.to_owned() };
        let reply = self.machine.call::<ForgetIssued>(&request).await?;
        match reply.issued {
            Some(issued) => {
                let seconds = i64::try_from(issued).unwrap_or(i64::MAX);
                let time = utc(Time { seconds, nanoseconds: 0 });
                eprintln!("Its content was signed at {time}; that is forgotten.");
            }
            None => eprintln!("The machine knows of no signed content of {path}."),
        }
        Ok(self.data(&reply, String::new).into())
    }

    async fn pause(&self, pause: &PauseArgs) -> Result<Output, ToolError> {
        let parse = |text: &String| time_parse::time(text, &jiff::Zoned::now());
        let time = pause.end.until.as_ref().map(parse).transpose().map_err(ToolError::Misuse)?;
        let clock = self.machine.poll().await?.clock;
        let until = match time {
            Some(time) => by_other_clock(time, wall(), clock),
            None => time_parse::later(clock, pause.end.lasting.unwrap_or_default()),
        };
        let paused = Paused { until, reason: pause.reason.clone() };
        self.machine.call::<Pause>(&paused).await?;
        let until = model::display::utc(until);
        eprintln!("No update is made until {until}. One that had begun is finished.");
        Ok(self.data(&paused, String::new).into())
    }

    async fn show_update(
        &self,
        name: &ImageName,
        progress: &mut Progress,
    ) -> Result<Output, ToolError> {
        let image = self.image(name).await?;
        let comparison = match self.machine.compare(&image).await? {
            Some(comparison) => comparison,
            None => {
                progress.stage(&format!("Scanning with the settings of {name}, for this alone."));
                let look = |hashed| progress.show(&format!("{} hashed", size(hashed)));
                self.machine.compare_by_preview(&image, look).await?
            }
        };
        progress.close();
        let mut former =
            FormerImage { image: comparison.reply.last_image.clone(), ..FormerImage::default() };
        match &former.image {
            Some(last) if last != name => match self.image(last).await {
                Ok(image) => former.triggers = image.content.triggers.clone(),
                Err(error) => former.unknown = Some(error_chain(&error)),
            },
            Some(_) => former.triggers = image.content.triggers.clone(),
            None => {}
        }
        let cached = cached_objects(&comparison.reply).iter().copied().collect();
        let preview = Preview::new(&image, &comparison.planned, &cached, &former);
        let code = if preview.same { EXIT_DONE } else { EXIT_DIFFERENT };
        Ok(Output { text: self.data(&preview, || preview.text()), code })
    }

    async fn cleanup(&self, all: bool) -> Result<Output, ToolError> {
        let reply = self.machine.poll().await?;
        let needed: BTreeSet<ObjectId> = match (all, &reply.last_image) {
            (true, _) => BTreeSet::new(),
            (false, None) => return Err(ToolError::NoImage),
            (false, Some(name)) => {
                let image = self.image(name).await?;
                let object = |node: Node| match node {
                    Node::Leaf(Leaf::File(file)) => Some(file.object.id()),
                    _ => None,
                };
                image.tree.nodes().filter_map(|(_, node)| object(node)).collect()
            }
        };
        let unneeded: Vec<ObjectId> =
            cached_objects(&reply).iter().filter(|id| !needed.contains(id)).copied().collect();
        for batch in unneeded.chunks(IDS_MAX) {
            self.machine.call::<Cleanup>(&CleanupRequest { objects: batch.to_vec() }).await?;
        }
        let left = cached_objects(&reply).len() - unneeded.len();
        let removed = counted(unneeded.len() as u64, "object");
        eprintln!("Removed {removed}, kept {left}.");
        Ok(self.data(&unneeded, String::new).into())
    }

    async fn wait_for(
        &self,
        image: &ImageName,
        progress: &mut Progress,
    ) -> Result<Output, ToolError> {
        let is_there = |reply: &PollReply| {
            let last = reply.last_update.as_ref();
            reply.last_image.as_ref() == Some(image)
                && last.is_some_and(|last| {
                    last.image == *image && last.verified_generation.is_some() && !last.awaits_boot
                })
        };
        progress.stage(&format!("Waiting for {image}."));
        let what = format!("the machine does not have {image}");
        let reply = self.machine.wait_until(&what, |_| (), is_there).await?;
        Ok(self.data(&reply.last_update, String::new).into())
    }

    async fn check_health(&self) -> Result<Output, ToolError> {
        let limit = self.arguments.timeout;
        let client = self.machine.client();
        let reply = client.call_within::<CheckHealth>(&(), limit).await?;
        match (&reply.health, self.arguments.format) {
            (Some(Health::Failed(why)), Format::Table) => Err(ToolError::Unhealthy(why.clone())),
            (Some(Health::Failed(_)), Format::Json) => {
                Ok(Output { text: json(&reply), code: EXIT_FAILED })
            }
            (health, _) => {
                let none = || "its image names no health check".to_owned();
                let text = health.as_ref().map_or_else(none, health_text);
                Ok(self.data(&reply, || format!("{text}\n")).into())
            }
        }
    }

    async fn retry_triggers(&self, progress: &mut Progress) -> Result<Output, ToolError> {
        let count = self.machine.poll().await?.trigger_failures.len();
        let failures = match count {
            0 => Vec::new(),
            _ => {
                progress.stage(&format!("Running {} again.", counted(count as u64, "trigger")));
                self.machine.call::<RetryTriggers>(&()).await?;
                let has_ended =
                    |reply: &PollReply| !matches!(reply.activity, Activity::Updating { .. });
                let what = "the triggers have not ended";
                self.machine.wait_until(what, |_| (), has_ended).await?.trigger_failures
            }
        };
        progress.close();
        let code = if failures.is_empty() { EXIT_DONE } else { EXIT_FAILED };
        let rows = || failures.iter().map(|failure| format!("{failure}\n")).collect();
        Ok(Output { text: self.data(&failures, rows), code })
    }
}

/// How much the clock of a machine may differ from the one here, in seconds.
const CLOCK_ERROR_SECONDS_MAX: i64 = 60;

/// Returns what another clock shows at `time` by the one here. It shows `there` when this one shows
/// `here`; a small difference counts as none. The machine ends a pause by elapsed time, so it ends
/// at `time` also if the clock of the machine is wrong, and corrected later.
fn by_other_clock(time: Time, here: Time, there: Time) -> Time {
    match there.seconds.saturating_sub(here.seconds) {
        error if error.saturating_abs() <= CLOCK_ERROR_SECONDS_MAX => time,
        error => Time { seconds: time.seconds.saturating_add(error), ..time },
    }
}

/// Returns the rows of the result of `push-image`.
fn pushed(report: &Report) -> Rows {
    let mut rows: Rows = vec![
        ("image", report.image.as_ref().map(ToString::to_string).unwrap_or_default()),
        ("updates", report.updates.to_string()),
        ("changes", report.operations.to_string()),
        (
            "fetched",
            format!(
                "{}, {}; {} were on the machine",
                counted(report.fetched_objects, "object"),
                size(report.fetched_bytes),
                report.reused_objects
            ),
        ),
        (
            "window",
            format!("{}.{:03} ms", report.window_ns / 1_000_000, report.window_ns / 1_000 % 1_000),
        ),
    ];
    rows.extend(report.blocked.iter().map(|blocked| ("not changed", blocked.clone())));
    for failure in &report.trigger_failures {
        let end = failure.output.trim_end().lines().last().unwrap_or_default();
        rows.push(("failed trigger", format!("{} {}: {end}", failure.verb, failure.service)));
    }
    rows.extend(report.health.as_ref().map(|health| ("health check", health_text(health))));
    if report.health_unchecked {
        rows.push(("health check", "not checked: root is not /".to_owned()));
    }
    rows
}

pub(super) fn table(rows: Rows) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    let line = |(name, value): (&str, String)| format!("{name:width$}  {value}");
    let lines = rows.into_iter().map(|row| line(row).trim_end().to_owned() + "\n");
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_that_of_the_clock_here_on_a_machine_whose_clock_is_wrong() {
        let at = |seconds: i64| Time { seconds, nanoseconds: 5 };
        #[rustfmt::skip]
        let table = [
            // time, here, there, time there
            (10_000, 1_000, 1_000, 10_000),
            (10_000, 1_000, 1_060, 10_000),
            (10_000, 1_000, 1_061, 10_061),
            (10_000, 1_000, 939,   9_939),
            (10_000, 1_000, 0,     9_000),
            (500,    1_000, 5_000, 4_500),
        ];
        for (time, here, there, expected) in table {
            let got = by_other_clock(at(time), at(here), at(there));
            assert_eq!(got, at(expected), "{time} {here} {there}");
        }
    }
}
