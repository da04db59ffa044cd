//! `imagetool replication`, `gc` and `accept-clock`: the image server itself.

use std::pin::pin;
use std::time::Duration;

use api::Done;
use api::image_server::collection::{Collect, CollectReply, CollectRequest, ObjectTotals};
use api::image_server::expiry::AcceptClock;
use api::image_server::replication::directories::TroubledDirectories;
use api::image_server::replication::{GetReplication, GetReplicationReply, LinkState, MasterState};
use model::display::{ago, rough_duration};
use model::image::ImageName;
use model::tree::Time;
use system::clock::wall;

use super::{Context, VerbResult, list, print};
use crate::output::failure::{Failure, Outcome};
use crate::output::progress::Unit;
use crate::output::{plural, size, time};

/// Time limit of a collection: the server walks all images and removes many files.
const COLLECT_LIMIT: Duration = Duration::from_secs(6 * 3_600);

/// Shows the state of replication: the master and the replicas of the image server.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool --imageserver images2 replication
  imagetool --imageserver images2 replication --format json | jq .master.is_level

A server that is started with `imageserver --replicate-from` has a master. Exit code 3: the master
does not answer, or images or directories differ from the master's; the output says what to do.")]
pub struct ReplicationArgs {}

pub async fn replication(context: &Context, _args: ReplicationArgs) -> VerbResult {
    let reply = context.client.call::<GetReplication>(&Done {}).await;
    let reply = reply.map_err(|error| Failure::from_call(&error))?;
    print(&context.format.render(&reply, |_| replication_text(&reply, wall())))?;
    Ok(outcome(&reply))
}

/// Says that a new image is on the master alone, because the server is a replica that does not
/// follow its name.
pub(super) async fn unfollowed(context: &Context, name: &ImageName) -> Option<String> {
    // The image is added, whatever becomes of the question.
    let reply = context.client.call::<GetReplication>(&Done {}).await.ok()?;
    unfollowed_text(&reply.master?, name)
}

fn unfollowed_text(master: &MasterState, name: &ImageName) -> Option<String> {
    let matches = |pattern: &String| {
        let pattern = pattern.strip_prefix('/').unwrap_or(pattern);
        list::glob_of(pattern).is_ok_and(|glob| glob.is_match(name.as_str()))
    };
    let is_followed = (master.include.is_empty() || master.include.iter().any(matches))
        && !master.exclude.iter().any(matches);
    (!is_followed).then(|| {
        format!(
            "warning: {name} is on the master {}, and not on this server: it is a replica that \
             does not follow this name (imagetool replication shows which). Machines cannot get \
             the image from here, unless --replicate-include and --replicate-exclude are changed",
            master.address
        )
    })
}

fn outcome(reply: &GetReplicationReply) -> Outcome {
    let is_well = |master: &MasterState| {
        master.link == LinkState::Connected
            && master.troubles_total == 0
            // An archive keeps images that have ended on its master.
            && (master.only_here_total == 0 || master.is_archive)
            && master.directories.is_none()
    };
    if reply.master.as_ref().is_none_or(is_well) { Outcome::Done } else { Outcome::Partly }
}

fn replication_text(reply: &GetReplicationReply, now: Time) -> String {
    let mut text = format!("Store      {}\n", reply.server);
    match &reply.master {
        None => text.push_str("Master     none: this server accepts changes itself\n"),
        Some(master) => text.push_str(&master_lines(master, now)),
    }
    if reply.replicas.is_empty() {
        text.push_str("Replicas   none have connected\n");
    }
    for (index, replica) in reply.replicas.iter().enumerate() {
        let head = if index == 0 { "Replicas" } else { "" };
        let state = match (replica.is_connected, replica.is_level) {
            (false, _) => format!("connected last {}", ago(now, replica.seen)),
            (true, true) => "level".to_owned(),
            (true, false) => format!("{} behind", plural(replica.images_behind, "image")),
        };
        text.push_str(&format!("{head:<10} {}: {state}\n", replica.address));
    }
    text
}

fn master_lines(master: &MasterState, now: Time) -> String {
    let mut lines = Vec::new();
    let since = ago(now, master.since);
    lines.push(format!("Master     {}: {}, since {since}", master.address, master.link.name()));
    let level = match (master.is_level, master.level_at) {
        (true, _) => "all followed images are here".to_owned(),
        (false, None) => "not yet".to_owned(),
        (false, Some(at)) => format!("last {}", ago(now, at)),
    };
    lines.push(format!("Level      {level}"));
    if master.images_behind > 0 {
        let images = plural(master.images_behind, "image");
        lines.push(format!("Behind     {images}, at most {}", size(master.bytes_left)));
    }
    let mut follows = match &master.include[..] {
        [] => "all images".to_owned(),
        include => include.join(", "),
    };
    if !master.exclude.is_empty() {
        follows.push_str(&format!(", except {}", master.exclude.join(", ")));
    }
    if master.is_archive {
        follows.push_str("; keeps what has ended there");
    }
    lines.push(format!("Follows    {follows}"));
    if master.not_followed > 0 {
        lines.push(format!(
            "Others     {} here that are not followed, and stay as they are",
            plural(master.not_followed, "image")
        ));
    }
    if let Some((at, why)) = &master.last_error {
        lines.push(format!("Last error {}: {why}", ago(now, *at)));
    }
    for image in &master.troubles {
        lines.push(format!("Trouble    {} ({}): {}", image.name, image.trouble.name(), image.text));
    }
    let unnamed = master.troubles_total.saturating_sub(master.troubles.len() as u64);
    if unnamed > 0 {
        lines.push(format!("           and {unnamed} more"));
    }
    if let Some(TroubledDirectories { trouble, text }) = &master.directories {
        lines.push(format!("Owners     {}: {text}", trouble.name()));
    }
    if master.only_here_total > 0 {
        let names: Vec<&str> = master.only_here.iter().take(10).map(|name| name.as_str()).collect();
        lines.push(format!(
            "Only here  {}, which the master never had or has lost, such as {}",
            plural(master.only_here_total, "image"),
            names.join(", ")
        ));
    }
    lines.into_iter().map(|line| line + "\n").collect()
}

/// Removes objects from the image server that no image needs.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool gc --dry-run          # what could be removed?
  imagetool gc                    # all of it
  imagetool gc --bytes 50000000000

The oldest objects are removed first. Objects that were uploaded, or found to be on the server so
that they need not be uploaded, are kept for a day, because an image with them may follow. The
server collects by itself when its disk is nearly full (imageserver --collect-above).")]
pub struct GcArgs {
    /// Only show what would be removed.
    #[arg(long)]
    pub dry_run: bool,
    /// Stop when this many bytes have been freed.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub bytes: Option<u64>,
}

pub async fn gc(context: &Context, args: GcArgs) -> VerbResult {
    let request = CollectRequest { dry_run: args.dry_run, bytes: args.bytes.unwrap_or(0) };
    context.meter.start("Seconds of searching all images", Unit::Items, None);
    let mut call = pin!(context.client.call_within::<Collect>(&request, COLLECT_LIMIT));
    let reply = loop {
        match tokio::time::timeout(Duration::from_secs(1), &mut call).await {
            Ok(reply) => break reply,
            Err(_) => context.meter.add(1),
        }
    };
    context.meter.finish();
    let reply = reply.map_err(|error| Failure::from_call(&error))?;
    eprint!("{}", collected_text(&reply, args.dry_run));
    context.print_if_json(&reply)?;
    let is_short = args.bytes.is_some_and(|bytes| reply.removed.bytes < bytes);
    Ok(if is_short { Outcome::Partly } else { Outcome::Done })
}

fn amount(amount: ObjectTotals) -> String {
    format!("{} ({})", plural(amount.objects, "object"), size(amount.bytes))
}

fn collected_text(reply: &CollectReply, dry_run: bool) -> String {
    let CollectReply { images, unneeded, leased, removed, held_seconds } = *reply;
    let mut text =
        format!("Needed by none of {}: {}.\n", plural(images, "image"), amount(unneeded));
    if leased.objects > 0 {
        let held = "may be on their way into an image and are held for a while";
        text.push_str(&format!("{} of these {held}.\n", amount(leased)));
    }
    let verb = if dry_run { "Would remove" } else { "Removed" };
    text.push_str(&format!("{verb} {}.\n", amount(removed)));
    if held_seconds > 0 {
        let left = rough_duration(held_seconds);
        text.push_str(&format!(
            "The server was restarted and removes nothing for another {left}: what was uploaded \
             before may be on its way into an image.\n"
        ));
    }
    text
}

/// Confirms that the image server's clock is right although it jumped.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool accept-clock

When the clock of the image server's machine jumps, no image expires: a clock that is wrong by a
year would expire them all. Images expire again when the clock has been back for a while, or after
this command. Look at `date` on that machine first.")]
pub struct AcceptClockArgs {}

pub async fn accept_clock(context: &Context, _args: AcceptClockArgs) -> VerbResult {
    let reply = context.client.call::<AcceptClock>(&Done {}).await;
    let reply = reply.map_err(|error| Failure::from_call(&error))?;
    let jumped = match reply.jumped_seconds {
        0 => "it had not jumped".to_owned(),
        seconds @ 1.. => format!("it had jumped by {}", plural(seconds.unsigned_abs(), "second")),
        seconds => {
            format!("it had been set back by {}", plural(seconds.unsigned_abs(), "second"))
        }
    };
    eprintln!("The image server's clock shows {}; {jumped}. Images expire.", time(reply.now));
    context.print_if_json(&reply)?;
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use api::image_server::replication::directories::DirectoriesTrouble;
    use api::image_server::replication::{
        ReplicaState, ReplicationTrouble, ServerId, TroubledImage,
    };

    use super::*;

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn name(text: &str) -> ImageName {
        ImageName::new(text).unwrap()
    }

    fn master() -> MasterState {
        MasterState {
            address: "images1:6971".to_owned(),
            server: Some(ServerId::from(2)),
            upstream: Vec::new(),
            link: LinkState::Connected,
            since: at(0),
            is_level: true,
            level_at: Some(at(90)),
            images_behind: 0,
            bytes_left: 0,
            last_error: None,
            include: Vec::new(),
            exclude: Vec::new(),
            is_archive: false,
            troubles: Vec::new(),
            troubles_total: 0,
            only_here: Vec::new(),
            only_here_total: 0,
            not_followed: 0,
            directories: None,
        }
    }

    fn reply(master: Option<MasterState>) -> GetReplicationReply {
        GetReplicationReply { server: ServerId::from(1), master, replicas: Vec::new() }
    }

    // tidy: table
    #[test]
    fn what_operators_need_is_told() {
        let store = "Store      00000000000000000000000000000001\n";
        let mut root = reply(None);
        let none =
            "Master     none: this server accepts changes itself\nReplicas   none have connected\n";
        assert_eq!(replication_text(&root, at(100)), format!("{store}{none}"));
        let replica = |number, address: &str, is_connected, is_level| ReplicaState {
            server: ServerId::from(number),
            address: address.to_owned(),
            seen: at(40),
            is_connected,
            is_level,
            images_behind: 3,
        };
        root.replicas = vec![
            replica(2, "a:6971", true, true),
            replica(3, "b:6971", true, false),
            replica(4, "c:6971", false, true),
        ];
        assert_eq!(
            replication_text(&root, at(100)),
            format!(
                "{store}Master     none: this server accepts changes itself\n\
                 Replicas   a:6971: level\n           b:6971: 3 images behind\n           \
                 c:6971: connected last 60 s ago\n"
            )
        );
        assert_eq!(outcome(&root), Outcome::Done);

        let strings = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let table: [(&[&str], &[&str], bool); 5] = [
            (&[], &[], true),
            (&["base/**"], &[], true),
            (&["/base/*"], &[], true),
            (&["web/**", "other"], &[], false),
            (&["base/**"], &["**/1"], false),
        ];
        for (include, exclude, is_followed) in table {
            let (include, exclude) = (strings(include), strings(exclude));
            let told =
                unfollowed_text(&MasterState { include, exclude, ..master() }, &name("base/1"));
            assert_eq!(told.is_none(), is_followed, "{told:?}");
        }

        let level = reply(Some(master()));
        assert_eq!(
            replication_text(&level, at(100)),
            format!(
                "{store}Master     images1:6971: connected, since 100 s ago\n\
                 Level      all followed images are here\nFollows    all images\n\
                 Replicas   none have connected\n"
            )
        );
        assert_eq!(outcome(&level), Outcome::Done);
        for (is_archive, expected) in [(false, Outcome::Partly), (true, Outcome::Done)] {
            let further = MasterState { only_here_total: 1, is_archive, ..master() };
            assert_eq!(outcome(&reply(Some(further))), expected);
        }
        let broken = reply(Some(MasterState {
            link: LinkState::Broken,
            is_level: false,
            images_behind: 2,
            bytes_left: 2_000,
            last_error: Some((at(99), "no route".to_owned())),
            include: vec!["base/**".to_owned()],
            exclude: vec!["**debug**".to_owned()],
            is_archive: true,
            troubles: vec![TroubledImage {
                name: name("base/1"),
                trouble: ReplicationTrouble::Conflict,
                text: "another".to_owned(),
            }],
            troubles_total: 3,
            only_here: vec![name("base/9")],
            only_here_total: 1,
            not_followed: 1,
            directories: Some(TroubledDirectories {
                trouble: DirectoriesTrouble::Conflict,
                text: "they began apart".to_owned(),
            }),
            ..master()
        }));
        assert_eq!(
            replication_text(&broken, at(100)),
            format!(
                "{store}Master     images1:6971: broken, since 100 s ago\n\
                 Level      last 10 s ago\n\
                 Behind     2 images, at most 2.0 kB\n\
                 Follows    base/**, except **debug**; keeps what has ended there\n\
                 Others     1 image here that are not followed, and stay as they are\n\
                 Last error 1 s ago: no route\n\
                 Trouble    base/1 (conflict): another\n           and 2 more\n\
                 Owners     conflict: they began apart\n\
                 Only here  1 image, which the master never had or has lost, such as base/9\n\
                 Replicas   none have connected\n"
            )
        );
        assert_eq!(outcome(&broken), Outcome::Partly);
    }

    #[test]
    fn what_was_removed_and_what_is_held_is_told() {
        let of = |objects, bytes| ObjectTotals { objects, bytes };
        let reply = CollectReply {
            images: 1,
            unneeded: of(12, 5_000_000),
            leased: of(2, 4_096),
            removed: of(10, 4_995_904),
            held_seconds: 0,
        };
        assert_eq!(
            collected_text(&reply, false),
            "Needed by none of 1 image: 12 objects (5.0 MB).\n\
             2 objects (4.1 kB) of these may be on their way into an image and are held for a \
             while.\n\
             Removed 10 objects (5.0 MB).\n"
        );
        let reply = CollectReply { held_seconds: 7_300, leased: of(0, 0), ..reply };
        assert_eq!(
            collected_text(&reply, true),
            "Needed by none of 1 image: 12 objects (5.0 MB).\n\
             Would remove 10 objects (5.0 MB).\n\
             The server was restarted and removes nothing for another 2 h: what was uploaded \
             before may be on its way into an image.\n"
        );
    }
}
