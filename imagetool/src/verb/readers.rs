//! `imagetool readers`: the machines that may read private images.

use std::collections::BTreeSet;

use api::fault::FaultCode;
use api::image_server::private::{
    ChangeReaders, ChangeReadersReply, ChangeReadersRequest, GetPrivateDirectories,
    GetPrivateDirectoriesRequest, PrivateDirectory,
};
use comfy_table::{Table, presets};
use model::display::safe_lines;
use model::image::ImageName;
use tool::Format;

use super::directories::directory_of;
use super::{Context, VerbResult, print, print_json};
use crate::output::failure::{Failure, Outcome};

/// Shows and changes which machines may read private images.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool readers
  imagetool readers db
  imagetool readers db --add db1.example.org --add 'backup*'
  imagetool readers db --remove db1.example.org

Images below a directory are private if the image server runs with --private-images DIRECTORY. They
are for its owners, for the machines that are named for it or for a directory above it, and for
callers with the power ImageServer.GetPrivateDirectories. A machine is named by the holder of its
certificate, which is its host name; * stands for any letters.")]
pub struct ReadersArgs {
    /// The directory. Without it all private directories are shown.
    #[arg(value_name = "DIR", value_parser = directory_of)]
    pub directory: Option<ImageName>,
    /// Machine that may read the images below the directory; may be repeated.
    #[arg(long, value_name = "HOST", requires = "directory")]
    pub add: Vec<String>,
    /// Machine that may not do so any more; may be repeated.
    #[arg(long, value_name = "HOST", requires = "directory")]
    pub remove: Vec<String>,
}

pub async fn run(context: &Context, args: ReadersArgs) -> VerbResult {
    let ReadersArgs { directory, add, remove } = args;
    match directory {
        Some(directory) if !add.is_empty() || !remove.is_empty() => {
            change(context, directory, add, remove).await
        }
        directory => show(context, directory).await,
    }
}

async fn change(
    context: &Context,
    name: ImageName,
    add: Vec<String>,
    remove: Vec<String>,
) -> VerbResult {
    let (add, remove) = (add.into_iter().collect(), remove.into_iter().collect());
    let request = ChangeReadersRequest { name: name.clone(), add, remove };
    let reply = context.client.call::<ChangeReaders>(&request).await;
    let reply = reply.map_err(|error| match error.code() {
        Some(FaultCode::NotFound) => Failure::new(&error).hint(format!(
            "`imagetool readers {name}` shows the machines, `imagetool tree` all directories"
        )),
        _ => Failure::from_call(&error),
    })?;
    let ChangeReadersReply { machines, is_private } = &reply;
    eprintln!("Images below {name} are for {}.", in_words(machines, "no machine"));
    if !is_private {
        eprintln!(
            "warning: they are not private: the image server runs without --private-images {name}"
        );
    }
    context.print_if_json(&reply)?;
    Ok(Outcome::Done)
}

fn in_words(machines: &BTreeSet<String>, none: &str) -> String {
    let all: Vec<&str> = machines.iter().map(String::as_str).collect();
    if all.is_empty() { none.to_owned() } else { all.join(", ") }
}

async fn show(context: &Context, below: Option<ImageName>) -> VerbResult {
    let mut all: Vec<PrivateDirectory> = Vec::new();
    loop {
        let after = all.last().map(|last| last.name.clone());
        let request = GetPrivateDirectoriesRequest { below: below.clone(), after };
        let reply = context.client.call::<GetPrivateDirectories>(&request).await;
        let reply = reply.map_err(|error| Failure::from_call(&error))?;
        let progress = !reply.directories.is_empty();
        all.extend(reply.directories);
        if !reply.more || !progress {
            break;
        }
    }
    match context.format {
        Format::Json => print_json(&all)?,
        Format::Table if all.is_empty() => eprintln!("There are no private directories."),
        Format::Table => print(&safe_lines(&table_of(&all)))?,
    }
    Ok(Outcome::Done)
}

fn table_of(directories: &[PrivateDirectory]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["DIRECTORY", "PRIVATE", "MACHINES"]);
    for PrivateDirectory { name, is_private, machines } in directories {
        let is_private = if *is_private { "yes" } else { "no" };
        table.add_row([name.as_str(), is_private, &in_words(machines, "-")]);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}
