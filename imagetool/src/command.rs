//! The command line of `imagetool`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use daemon::{IMAGESERVER_PORT, SecurityArgs};
use rpc::client::{Client, Peer};
use rpc::tls::Security;
use tool::Format;
use tool::documents::{self, Documents};

use crate::output::failure::Failure;
use crate::output::progress::Meter;
use crate::verb::{self, Context, VerbResult};

/// Makes, shows and fetches images: file-system trees that machines are kept equal to.
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

Defaults for --imageserver, --tls and others can be set in ~/.config/dominator/config.toml.
Data goes to the standard output, everything else to the standard error.
Exit codes: 0 done (compared: same), 1 failed, 2 misuse, 3 partly done (compared: different)."
)]
pub struct Arguments {
    /// Address of the image server, HOST or HOST:PORT.
    #[arg(
        long,
        global = true,
        value_name = "ADDR",
        env = "DOMINATOR_IMAGESERVER",
        default_value = "localhost:6971"
    )]
    imageserver: String,
    /// Output format.
    #[arg(long, global = true, value_enum, value_name = "FORMAT", default_value_t)]
    format: Format,
    /// When to compress objects (zstd) in transit.
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t)]
    pack: Pack,
    #[command(flatten)]
    security: SecurityArgs,
    #[command(subcommand)]
    command: Command,
}

/// When objects are compressed in transit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Pack {
    /// Unless the server is on this machine
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
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
    Server(ServerVerb),
    #[command(flatten)]
    LocalVerb(LocalVerb),
    #[command(flatten)]
    Documents(Documents),
}

#[derive(Debug, Subcommand)]
enum ServerVerb {
    Add(Box<verb::add::AddArgs>),
    AddOverlay(Box<verb::add_overlay::AddOverlayArgs>),
    AddFromSub(verb::add_from_sub::AddFromSubArgs),
    List(verb::list::ListArgs),
    Show(verb::show::ShowArgs),
    Get(verb::get::GetArgs),
    Tar(verb::tar::TarArgs),
    Delete(verb::change::DeleteArgs),
    Copy(verb::change::CopyArgs),
    Tag(verb::change::TagArgs),
    Sign(verb::signatures::SignArgs),
    FindLatest(verb::find::FindLatestArgs),
    ChangeExpiry(verb::change::ChangeExpiryArgs),
    AcceptClock(verb::server::AcceptClockArgs),
    Gc(verb::server::GcArgs),
    Replication(verb::server::ReplicationArgs),
    Diff(verb::diff::DiffArgs),
    ShowFile(verb::files::ShowFileArgs),
    GetFile(verb::files::GetFileArgs),
    ShowComputedFiles(verb::computed::ShowComputedFilesArgs),
    Check(verb::find::CheckArgs),
    Verify(verb::verify::VerifyArgs),
    VerifySignatures(verb::signatures::VerifySignaturesArgs),
    Estimate(verb::estimate::EstimateArgs),
    Tree(verb::directories::TreeArgs),
    Mkdir(verb::directories::MkdirArgs),
    Rmdir(verb::directories::RmdirArgs),
    Chown(verb::directories::ChownArgs),
    Readers(verb::readers::ReadersArgs),
}

// Verbs that do not use the image server.
#[derive(Debug, Subcommand)]
enum LocalVerb {
    MergeFilters(verb::filters::MergeFiltersArgs),
    MergeTriggers(verb::triggers::MergeTriggersArgs),
    MatchTriggers(verb::triggers::MatchTriggersArgs),
    ScanFilter(verb::filters::ScanFilterArgs),
}

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    let arguments: Arguments = daemon::config::parse_tool();
    let Arguments { imageserver, format, pack, security, command } = arguments;
    let ended = match command {
        Command::Documents(documents) => return documents::run::<Arguments>(&documents),
        Command::LocalVerb(verb) => run_local_verb(format, verb),
        Command::Server(verb) => run(&imageserver, (format, pack), &security, verb),
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
    verb: ServerVerb,
) -> VerbResult {
    let security = security.for_tool("imagetool").map_err(|error| {
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
        .map_err(|error| Failure::from_text(format!("cannot start: {error}")))?;
    runtime.block_on(run_server_verb(&context, verb))
}

fn run_local_verb(format: Format, verb: LocalVerb) -> VerbResult {
    match verb {
        LocalVerb::MergeFilters(args) => verb::filters::merge_filters(format, &args),
        LocalVerb::MergeTriggers(args) => verb::triggers::merge_triggers(&args),
        LocalVerb::MatchTriggers(args) => verb::triggers::match_triggers(format, args),
        LocalVerb::ScanFilter(args) => {
            verb::filters::scan_filter(format, &Meter::on_terminal(), &args)
        }
    }
}

async fn run_server_verb(context: &Context, verb: ServerVerb) -> VerbResult {
    match verb {
        ServerVerb::Add(args) => verb::add::run(context, *args).await,
        ServerVerb::AddOverlay(args) => verb::add_overlay::run(context, *args).await,
        ServerVerb::AddFromSub(args) => verb::add_from_sub::run(context, args).await,
        ServerVerb::List(args) => verb::list::run(context, args).await,
        ServerVerb::Show(args) => verb::show::run(context, args).await,
        ServerVerb::Get(args) => verb::get::run(context, args).await,
        ServerVerb::Tar(args) => verb::tar::run(context, args).await,
        ServerVerb::Delete(args) => verb::change::delete(context, args).await,
        ServerVerb::Copy(args) => verb::change::copy(context, args).await,
        ServerVerb::Tag(args) => verb::change::tag(context, args).await,
        ServerVerb::Sign(args) => verb::signatures::sign(context, args).await,
        ServerVerb::FindLatest(args) => verb::find::find_latest(context, args).await,
        ServerVerb::ChangeExpiry(args) => verb::change::change_expiry(context, args).await,
        ServerVerb::AcceptClock(args) => verb::server::accept_clock(context, args).await,
        ServerVerb::Replication(args) => verb::server::replication(context, args).await,
        ServerVerb::Gc(args) => verb::server::gc(context, args).await,
        ServerVerb::Diff(args) => verb::diff::run(context, args).await,
        ServerVerb::ShowFile(args) => verb::files::show_file(context, args).await,
        ServerVerb::GetFile(args) => verb::files::get_file(context, args).await,
        ServerVerb::ShowComputedFiles(args) => verb::computed::run(context, args).await,
        ServerVerb::Check(args) => verb::find::check(context, args).await,
        ServerVerb::Verify(args) => verb::verify::run(context, args).await,
        ServerVerb::VerifySignatures(args) => {
            verb::signatures::verify_signatures(context, args).await
        }
        ServerVerb::Estimate(args) => verb::estimate::run(context, args).await,
        ServerVerb::Tree(args) => verb::directories::tree(context, args).await,
        ServerVerb::Mkdir(args) => verb::directories::mkdir(context, args).await,
        ServerVerb::Rmdir(args) => verb::directories::rmdir(context, args).await,
        ServerVerb::Chown(args) => verb::directories::chown(context, args).await,
        ServerVerb::Readers(args) => verb::readers::run(context, args).await,
    }
}
