//! The command line of `imagetool`.

use rpc::tls::Security;
use std::process::ExitCode;

use crate::failure::Failure;
use crate::progress::Meter;
use crate::verb::{self, Context, Ended};
use clap::{Parser, Subcommand};
use daemon::{IMAGESERVER_PORT, SecurityArgs};
use rpc::client::{Client, Peer};
use tool::Format;
use tool::documents::{self, Documents};

/// Makes, shows and fetches images: whole file-system trees that machines are kept equal to.
#[derive(Debug, Parser)]
#[command(
    name = "imagetool",
    version,
    after_help = "\
Examples:
  imagetool add base/debian-12.7 root.tar.zst filter triggers.json
  imagetool list
  imagetool show base/debian-12.7
  imagetool diff base/debian-12.6 base/debian-12.7
  imagetool get base/debian-12.7 /srv/chroot/debian
  imagetool tar base/debian-12.7 -o debian.tar.zst
  imagetool add-overlay web/9 base/debian-12.7 nginx.tar
  imagetool delete base/debian-12.6

Defaults for --imageserver, --tls and others may stand in ~/.config/dominator/config.toml.
Data goes to the standard output, everything else to the standard error.
Exit codes: 0 done (compared: same), 1 failed, 2 misuse, 3 partly done (compared: different)."
)]
pub struct Arguments {
    /// The image server, HOST or HOST:PORT.
    #[arg(
        long,
        global = true,
        value_name = "ADDR",
        env = "DOMINATOR_IMAGESERVER",
        default_value = "localhost:6971"
    )]
    imageserver: String,
    /// How data is printed.
    #[arg(long, global = true, value_enum, value_name = "FORMAT", default_value_t)]
    format: Format,
    /// Whether objects are packed (zstd) on their way.
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t)]
    pack: Pack,
    #[command(flatten)]
    security: SecurityArgs,
    #[command(subcommand)]
    command: Command,
}

/// Whether objects are packed on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Pack {
    /// Unless the server is on this machine.
    #[default]
    Auto,
    /// Wherever the server is.
    Always,
    /// Not even if the network is slow.
    Never,
}

impl Pack {
    fn client(self, peer: Peer, security: &Security) -> Client {
        match self {
            Self::Auto => Client::new(peer, security),
            Self::Always => Client::packing(peer, security, true),
            Self::Never => Client::packing(peer, security, false),
        }
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Asking(Verb),
    #[command(flatten)]
    Here(Here),
    #[command(flatten)]
    Documents(Documents),
}

#[derive(Debug, Subcommand)]
enum Verb {
    Add(Box<verb::add::AddArgs>),
    AddOverlay(Box<verb::add_overlay::AddOverlayArgs>),
    AddFromSub(verb::add_from_sub::AddFromSubArgs),
    List(verb::list::ListArgs),
    Show(verb::show::ShowArgs),
    Get(verb::get::GetArgs),
    Tar(verb::tar::TarArgs),
    Delete(verb::delete::DeleteArgs),
    Copy(verb::copy::CopyArgs),
    Tag(verb::tag::TagArgs),
    Sign(verb::sign::SignArgs),
    FindLatest(verb::find_latest::FindLatestArgs),
    ChangeExpiry(verb::change_expiry::ChangeExpiryArgs),
    AcceptClock(verb::accept_clock::AcceptClockArgs),
    Gc(verb::gc::GcArgs),
    Replication(verb::replication::ReplicationArgs),
    Diff(verb::diff::DiffArgs),
    ShowFile(verb::show_file::ShowFileArgs),
    GetFile(verb::get_file::GetFileArgs),
    Check(verb::check::CheckArgs),
    Verify(verb::verify::VerifyArgs),
    VerifySignatures(verb::verify_signatures::VerifySignaturesArgs),
    Estimate(verb::estimate::EstimateArgs),
    Tree(verb::tree::TreeArgs),
    Mkdir(verb::mkdir::MkdirArgs),
    Rmdir(verb::rmdir::RmdirArgs),
    Chown(verb::chown::ChownArgs),
}

// What needs no server.
#[derive(Debug, Subcommand)]
enum Here {
    MergeFilters(verb::merge_filters::MergeFiltersArgs),
    MergeTriggers(verb::merge_triggers::MergeTriggersArgs),
    MatchTriggers(verb::match_triggers::MatchTriggersArgs),
    ScanFilter(verb::scan_filter::ScanFilterArgs),
}

/// Runs the program, with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Arguments = daemon::config::parse_tool();
    let Arguments { imageserver, format, pack, security, command } = arguments;
    let ended = match command {
        Command::Documents(documents) => return documents::run::<Arguments>(&documents),
        Command::Here(verb) => run_here(format, verb),
        Command::Asking(verb) => run(&imageserver, (format, pack), &security, verb),
    };
    match ended {
        Ok(outcome) => ExitCode::from(outcome.exit_code()),
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}

fn run(
    imageserver: &str,
    (format, pack): (Format, Pack),
    security: &SecurityArgs,
    verb: Verb,
) -> Ended {
    let security = security.of_tool("imagetool").map_err(|error| {
        let failure = Failure::new(&error).misuse();
        error.hints().into_iter().fold(failure, Failure::hint)
    })?;
    let peer = Peer::parse(imageserver, IMAGESERVER_PORT)
        .map_err(|error| Failure::new(&error).misuse())?;
    let context = Context {
        client: pack.client(peer, &security),
        security,
        format,
        meter: Meter::on_terminal(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::of_text(format!("cannot start: {error}")))?;
    runtime.block_on(carry_out(&context, verb))
}

fn run_here(format: Format, verb: Here) -> Ended {
    match verb {
        Here::MergeFilters(args) => verb::merge_filters::run(format, &args),
        Here::MergeTriggers(args) => verb::merge_triggers::run(&args),
        Here::MatchTriggers(args) => verb::match_triggers::run(format, args),
        Here::ScanFilter(args) => verb::scan_filter::run(format, &Meter::on_terminal(), &args),
    }
}

async fn carry_out(context: &Context, verb: Verb) -> Ended {
    match verb {
        Verb::Add(args) => verb::add::run(context, *args).await,
        Verb::AddOverlay(args) => verb::add_overlay::run(context, *args).await,
        Verb::AddFromSub(args) => verb::add_from_sub::run(context, args).await,
        Verb::List(args) => verb::list::run(context, args).await,
        Verb::Show(args) => verb::show::run(context, args).await,
        Verb::Get(args) => verb::get::run(context, args).await,
        Verb::Tar(args) => verb::tar::run(context, args).await,
        Verb::Delete(args) => verb::delete::run(context, args).await,
        Verb::Copy(args) => verb::copy::run(context, args).await,
        Verb::Tag(args) => verb::tag::run(context, args).await,
        Verb::Sign(args) => verb::sign::run(context, args).await,
        Verb::FindLatest(args) => verb::find_latest::run(context, args).await,
        Verb::ChangeExpiry(args) => verb::change_expiry::run(context, args).await,
        Verb::AcceptClock(args) => verb::accept_clock::run(context, args).await,
        Verb::Replication(args) => verb::replication::run(context, args).await,
        Verb::Gc(args) => verb::gc::run(context, args).await,
        Verb::Diff(args) => verb::diff::run(context, args).await,
        Verb::ShowFile(args) => verb::show_file::run(context, args).await,
        Verb::GetFile(args) => verb::get_file::run(context, args).await,
        Verb::Check(args) => verb::check::run(context, args).await,
        Verb::Verify(args) => verb::verify::run(context, args).await,
        Verb::VerifySignatures(args) => verb::verify_signatures::run(context, args).await,
        Verb::Estimate(args) => verb::estimate::run(context, args).await,
        Verb::Tree(args) => verb::tree::run(context, args).await,
        Verb::Mkdir(args) => verb::mkdir::run(context, args).await,
        Verb::Rmdir(args) => verb::rmdir::run(context, args).await,
        Verb::Chown(args) => verb::chown::run(context, args).await,
    }
}
