//! Asks machines how many files they keep with numbers of users and groups that mean others in the
//! image that they would get. Callers are served one at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::dominator::kept_files::{
    COUNTING_MAX, CountKeptFilesReply, CountKeptFilesRequest, ImageOfMachine, KeptFiles, KeptNumber,
};
use api::fault::FaultCode;
use api::subd::{CountOwners, CountOwnersReply, CountOwnersRequest};
use futures_util::future::join_all;
use model::accounts::{Accounts, ids};
use model::display::error_chain;
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::path::TreePath;
use rpc::client::Client;

use super::{Fleet, OrderError};
use crate::core::kept_files::{COUNT_MS, add_counts, old_numbers, request};
use crate::runtime::driver::client_of;

/// How long a machine may take to answer.
const CALL_LIMIT: Duration = Duration::from_millis(COUNT_MS as u64 + 15_000);

/// The machine to ask, and what for; or why it is not asked.
type Question = Result<(Client, CountOwnersRequest), String>;

/// The users and groups of images, or why they are not known.
#[derive(Default)]
struct KnownAccounts(BTreeMap<ImageName, Result<Accounts, String>>);

impl Fleet {
    /// Counts the files that machines would keep with old numbers. Machines that are not known, or
    /// not known to have had another image, are left out.
    pub async fn count_kept_files(
        &self,
        asked: CountKeptFilesRequest,
    ) -> Result<CountKeptFilesReply, OrderError> {
        if asked.machines.len() > COUNTING_MAX {
            return Err(OrderError::TooManyCounting);
        }
        let _turn = self.counting.lock().await;
        let mut known = KnownAccounts::default();
        let mut questions = Vec::new();
        for machine in asked.machines {
            questions.extend(self.question(&mut known, machine).await);
        }
        let machines = questions.into_iter().map(async |(mut kept, question)| {
            let reply = match question {
                Ok((client, request)) => count(&client, &request).await,
                Err(why) => Err(why),
            };
            add_counts(&mut kept, reply);
            kept
        });
        Ok(CountKeptFilesReply { machines: join_all(machines).await })
    }

    /// Returns what is to be asked of a machine; `None` if no numbers differ.
    async fn question(
        &self,
        known: &mut KnownAccounts,
        asked: ImageOfMachine,
    ) -> Option<(KeptFiles, Question)> {
        let ImageOfMachine { hostname, image } = asked;
        let (handle, machine) = self.find(&hostname).ok()?;
        let input = handle.with_sub(|sub| sub.preview_input()).ok()?;
        let from = input.last_image.filter(|from| *from != image)?;
        let numbers = self.numbers(known, &from, &image).await;
        let mut kept = KeptFiles {
            hostname,
            from,
            image,
            numbers: Vec::new(),
            unfinished: None,
            unknown: None,
        };
        let question = match numbers {
            Ok((_, numbers)) if numbers.is_empty() => return None,
            Ok((image, numbers)) => {
                let request = request(&image.scan, &numbers);
                kept.numbers = numbers;
                match input.is_right_machine {
                    true => Ok((client_of(&machine, &self.shared), request)),
                    false => Err("it may be another machine than the one that is meant".to_owned()),
                }
            }
            Err(why) => Err(why),
        };
        Some((kept, question))
    }

    /// Returns the image `new`, and the numbers of the image `from` that mean others in it.
    async fn numbers(
        &self,
        known: &mut KnownAccounts,
        from: &ImageName,
        new: &ImageName,
    ) -> Result<(Arc<RequiredImage>, Vec<KeptNumber>), String> {
        for name in [from, new] {
            if !known.0.contains_key(name) {
                known.0.insert(name.clone(), self.accounts(name).await);
            }
        }
        let accounts = |name| known.0[name].as_ref().map_err(String::clone);
        let numbers = old_numbers(accounts(from)?, accounts(new)?)?;
        Ok((self.shared.images.look_up(new).await?, numbers))
    }

    /// Reads the users and groups of an image.
    async fn accounts(&self, name: &ImageName) -> Result<Accounts, String> {
        let read = async |path| {
            let path = TreePath::new(path).expect("the constants are paths");
            self.shared.images.small_file(name, &path).await.map(|text| ids(&text))
        };
        Ok(Accounts { users: read("/etc/passwd").await?, groups: read("/etc/group").await? })
    }
}

async fn count(client: &Client, request: &CountOwnersRequest) -> Result<CountOwnersReply, String> {
    let reply = client.call_within::<CountOwners>(request, CALL_LIMIT).await;
    reply.map_err(|error| match error.code() {
        Some(FaultCode::NoMethod) => "its subd is of a release that cannot count them".to_owned(),
        _ => error_chain(&error),
    })
}
