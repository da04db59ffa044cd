//! The bytes of everything that travels or is digested, pinned.
//!
//! A change of these files is a change of the protocol or of the image format: peers and images
//! of earlier releases must be thought of. `UPDATE_EXPECT=1 cargo test -p rpc` writes them.

use std::fmt::{Debug, Write as _};

use api::audit::call_details::CallDetails;
use api::codec::{Encoding, decode, encode};
use api::object_stream::{ContentForm, ObjectHead};
use api::{dominator, file_generator, image_server, mdb, object_server, subd};
use api::{
    fault::{Fault, FaultCode},
    method::{Effect, Method},
};
use expect_test::{ExpectFile, expect_file};
use model::object::Algorithm;
use model::tree::{Child, Directory, text};
use rpc::packing;
use rpc::server::head_bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::samples;

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for line in bytes.chunks(40) {
        text.push_str("  ");
        for byte in line {
            write!(text, "{byte:02x}").unwrap();
        }
        text.push('\n');
    }
    text
}

/// Both encodings of `value`, each seen to decode to the same value again.
fn both<T: Serialize + DeserializeOwned>(text: &mut String, what: &'static str, value: &T) {
    let bincode = encode(Encoding::Bincode, what, value).unwrap();
    let json = encode(Encoding::Json, what, value).unwrap();
    let limit = 1 << 20;
    let again: T = decode(Encoding::Bincode, what, &bincode, limit).unwrap();
    assert_eq!(encode(Encoding::Json, what, &again).unwrap(), json);
    let again: T = decode(Encoding::Json, what, &json, limit).unwrap();
    assert_eq!(encode(Encoding::Bincode, what, &again).unwrap(), bincode);
    // Whatever is cut off, what is left is refused.
    for length in 0..bincode.len() {
        assert!(decode::<T>(Encoding::Bincode, what, &bincode[..length], limit).is_err());
    }
    write!(text, "{what}, bincode:\n{}", hex(&bincode)).unwrap();
    writeln!(text, "{what}, JSON:\n  {}", String::from_utf8(json).unwrap()).unwrap();
}

/// The names of the methods that were pinned, and their text.
#[derive(Default)]
struct Pinned {
    names: Vec<&'static str>,
    text: String,
}

impl Pinned {
    fn method<M: Method>(&mut self, (request, reply): (M::Request, M::Reply)) {
        self.names.push(M::NAME);
        writeln!(self.text, "== {}", M::NAME).unwrap();
        both(&mut self.text, "request", &request);
        both(&mut self.text, "reply", &reply);
        if M::EFFECT != Effect::Tells {
            let CallDetails { arguments, why, who } = M::audit_details(&request);
            writeln!(self.text, "audit:\n  {arguments} | {why} | {who}").unwrap();
        }
        self.text.push('\n');
    }

    fn check(self, service: &str, file: ExpectFile) {
        let mut names = self.names;
        names.sort_unstable();
        let served: Vec<&str> = api::methods()
            .into_iter()
            .filter(|method| !method.reserved && method.name.starts_with(service))
            .map(|method| method.name)
            .collect();
        assert_eq!(names, served);
        file.assert_eq(&self.text);
    }
}

#[test]
fn methods_of_subd_have_these_bytes() {
    let mut pinned = Pinned::default();
    pinned.method::<subd::Poll>(samples::poll());
    pinned.method::<subd::GetDirectories>(samples::get_directories());
    pinned.method::<subd::Fetch>(samples::fetch());
    pinned.method::<subd::Prepare>(samples::prepare());
    pinned.method::<subd::Commit>(samples::commit());
    pinned.method::<subd::Cleanup>(samples::cleanup());
    pinned.method::<subd::GetConfiguration>(((), samples::configuration()));
    pinned.method::<subd::SetConfiguration>((samples::set_configuration(), Default::default()));
    pinned.method::<subd::ScanNow>((samples::scan_now(), Default::default()));
    pinned.method::<subd::Pause>((samples::paused(), Default::default()));
    pinned.method::<subd::Resume>(((), Default::default()));
    pinned.method::<subd::GetFiles>(samples::get_files());
    pinned.method::<subd::CheckHealth>(((), samples::check_health()));
    pinned.method::<subd::OfferImage>((samples::offer_image(), Default::default()));
    pinned.method::<subd::OfferContents>((samples::offer_contents(), Default::default()));
    pinned.method::<subd::ForgetIssued>(samples::forget_issued());
    pinned.method::<subd::GetRefusedChanges>(samples::get_refused_changes());
    pinned.method::<subd::GetDirectoryBlocks>(samples::get_directory_blocks());
    pinned.method::<subd::HoldMachine>(samples::hold_machine());
    pinned.method::<subd::TakeOver>(samples::take_over());
    pinned.method::<subd::RetryTriggers>(((), Default::default()));
    pinned.method::<subd::PreviewScan>(samples::preview_scan());
    pinned.method::<subd::GetLimits>(((), samples::limits_in_force()));
    pinned.method::<subd::Hurry>(((), Default::default()));
    pinned.method::<subd::CountOwners>(samples::count_owners());
    pinned.method::<subd::AddObjects>((samples::add_to_cache(), Default::default()));
    pinned.method::<subd::ReplaceCertificate>((samples::replace_certificate(), Default::default()));
    pinned.method::<subd::GetTasks>(samples::get_tasks());
    pinned.method::<subd::GetTaskStates>(samples::get_task_states());
    pinned.method::<subd::OrderTask>((samples::order_task(), Default::default()));
    pinned.method::<subd::GetTaskLog>(samples::get_task_log());
    pinned.method::<subd::PermitTask>(samples::permit_task());
    pinned.method::<subd::Provision>((samples::provision(), Default::default()));
    let go_on = samples::continue_provisioning();
    pinned.method::<subd::ContinueProvisioning>((go_on, Default::default()));
    let give_up = samples::give_up_provisioning();
    pinned.method::<subd::GiveUpProvisioning>((give_up, Default::default()));
    pinned.method::<subd::PlanResources>(samples::plan_resources());
    pinned.method::<subd::GetResources>(samples::get_resources());
    let order = samples::order_resource();
    pinned.method::<subd::OrderResource>((order, Default::default()));
    pinned.method::<subd::GetFleetResources>(samples::get_fleet_resources());
    let telling = samples::tell_fleet_resources();
    pinned.method::<subd::TellFleetResources>((telling, Default::default()));
    pinned.check("Subd.", expect_file!["golden/subd.txt"]);
}

#[test]
fn methods_of_the_image_server_have_these_bytes() {
    let mut pinned = Pinned::default();
    pinned.method::<image_server::AddImage>(samples::add_image());
    pinned.method::<image_server::GetImage>(samples::get_image());
    pinned.method::<image_server::ListImages>(samples::list_images());
    pinned.method::<image_server::DeleteImage>(samples::delete_image());
    pinned.method::<image_server::collection::Collect>(samples::collect());
    pinned.method::<image_server::notes::CopyImage>(samples::copy_image());
    pinned.method::<image_server::notes::ChangeTags>(samples::change_tags());
    pinned.method::<image_server::notes::FindLatestImage>(samples::find_latest_image());
    pinned.method::<image_server::directories::MakeDirectory>(samples::make_directory());
    pinned.method::<image_server::directories::RemoveDirectory>(samples::remove_directory());
    pinned.method::<image_server::directories::ChangeOwner>(samples::change_owner());
    pinned.method::<image_server::directories::ListDirectories>(samples::list_directories());
    pinned.method::<image_server::private::ChangeReaders>(samples::change_readers());
    pinned
        .method::<image_server::private::GetPrivateDirectories>(samples::get_private_directories());
    pinned.method::<image_server::collection::EstimateImage>(samples::estimate_image());
    pinned.method::<image_server::expiry::ChangeExpiry>(samples::change_expiry());
    pinned.method::<image_server::expiry::AcceptClock>(samples::accept_clock());
    pinned.method::<image_server::expiry::HoldImages>(samples::hold_images());
    pinned.method::<image_server::notes::ChangeSignatures>(samples::change_signatures());
    use image_server::replication::{DropCopy, Forward, GetImageUpdates, GetReplication};
    pinned.method::<GetImageUpdates>(samples::get_image_updates());
    use image_server::replication::directories::GetMadeDirectories;
    pinned.method::<GetMadeDirectories>(samples::get_made_directories());
    pinned.method::<Forward>(samples::forward());
    pinned.method::<GetReplication>(samples::get_replication());
    pinned.method::<DropCopy>(samples::drop_copy());
    pinned.check("ImageServer.", expect_file!["golden/image_server.txt"]);
}

#[test]
fn methods_of_the_object_server_have_these_bytes() {
    let mut pinned = Pinned::default();
    pinned.method::<object_server::AddObjects>(samples::add_objects());
    pinned.method::<object_server::CheckObjects>(samples::check_objects());
    pinned.method::<object_server::GetObjects>(samples::get_objects());
    pinned.check("ObjectServer.", expect_file!["golden/object_server.txt"]);
}

#[test]
fn methods_of_the_dominator_have_these_bytes() {
    let mut pinned = Pinned::default();
    pinned.method::<dominator::ListSubs>(samples::list_subs());
    pinned.method::<dominator::ShowSub>(samples::show_sub());
    pinned.method::<dominator::GetStatus>(samples::get_status());
    pinned.method::<dominator::DisableUpdates>(samples::disable_updates());
    pinned.method::<dominator::EnableUpdates>(samples::enable_updates());
    pinned.method::<dominator::ClearSafetyShutoff>(samples::clear_safety_shutoff());
    pinned.method::<dominator::Retry>(samples::retry());
    pinned.method::<dominator::orders::Trust>(samples::trust());
    pinned.method::<dominator::orders::AcceptImage>(samples::accept_image());
    pinned.method::<dominator::orders::ResumeImage>(samples::resume_image());
    pinned.method::<dominator::content::ListContentChanges>(samples::list_content_changes());
    pinned.method::<dominator::content::OrderContentChange>(samples::order_content_change());
    pinned.method::<dominator::mdb::ShowMdb>(samples::show_mdb());
    pinned.method::<dominator::mdb::AcceptMdb>(samples::accept_mdb());
    pinned.method::<dominator::events::ListEvents>(samples::list_events());
    pinned.method::<dominator::events::AcceptClock>(samples::accept_dominator_clock());
    pinned.method::<dominator::events::Backup>(samples::backup());
    pinned.method::<dominator::explain::Explain>(samples::explain());
    pinned.method::<dominator::orders::PauseUpdates>(samples::pause_updates());
    pinned.method::<dominator::orders::ResumeUpdates>(samples::resume_updates());
    pinned.method::<dominator::rollback::RollBack>(samples::roll_back());
    pinned.method::<dominator::rollback::EndRollback>(samples::end_rollback());
    pinned.method::<dominator::rollback::ListLastingOrders>(samples::list_lasting_orders());
    pinned.method::<dominator::orders::ForceDisruptiveUpdate>(samples::force_disruptive_update());
    pinned.method::<dominator::orders::GoOn>(samples::go_on());
    pinned.method::<dominator::permits::FenceMachine>(samples::fence_machine());
    pinned.method::<dominator::permits::ListPermits>(((), samples::list_permits()));
    pinned.method::<dominator::departing::ListDeparting>(((), samples::list_departing()));
    pinned.method::<dominator::departing::OrderDeparting>(samples::order_departing());
    pinned.method::<dominator::orders::FastUpdate>(samples::fast_update());
    pinned.method::<dominator::orders::WatchSub>(samples::watch_sub());
    pinned.method::<dominator::orders::SetDefaultImage>(samples::set_default_image());
    pinned.method::<dominator::plan::PlanMachine>(samples::plan_machine());
    pinned.method::<dominator::plan::PlanMachines>(samples::plan_machines());
    pinned.method::<dominator::plan::CheckMdb>(samples::check_mdb());
    pinned.method::<dominator::settings::SetSubConfiguration>(samples::set_sub_configuration());
    pinned.method::<dominator::settings::GetSubConfiguration>(samples::get_sub_configuration());
    pinned.method::<dominator::settings::GetSubLimits>(samples::get_sub_limits());
    pinned.method::<dominator::tasks::ListTasks>(samples::list_tasks());
    pinned.method::<dominator::tasks::GetTask>(samples::get_task());
    pinned.method::<dominator::tasks::OrderTasks>(samples::order_tasks());
    pinned.method::<dominator::tasks::GetTaskLog>(samples::get_fleet_task_log());
    pinned.method::<dominator::kept_files::CountKeptFiles>(samples::count_kept_files());
    let plans = samples::plan_resources_of_machines();
    pinned.method::<dominator::resources::PlanResources>(plans);
    pinned.method::<dominator::resources::GetResources>(samples::machine_resources());
    let order = samples::order_machine_resource();
    pinned.method::<dominator::resources::OrderResource>((order, Default::default()));
    pinned.method::<dominator::rollouts::EditEnvironments>(samples::edit_environments());
    pinned.method::<dominator::rollouts::OrderEnvironment>(samples::order_environment());
    pinned.method::<dominator::rollouts::ListEnvironments>(samples::list_environments());
    pinned.method::<dominator::rollouts::PlanRollout>(samples::plan_rollout());
    pinned.method::<dominator::rollouts::StartRollout>(samples::start_rollout());
    pinned.method::<dominator::rollouts::OrderRollout>(samples::order_rollout());
    pinned.method::<dominator::rollouts::VoteOnStep>(samples::vote_on_step());
    pinned.method::<dominator::rollouts::ListRollouts>(samples::list_rollouts());
    pinned.check("Dominator.", expect_file!["golden/dominator.txt"]);
}

#[test]
fn methods_of_the_mdb_server_have_these_bytes() {
    let mut pinned = Pinned::default();
    pinned.method::<mdb::GetMdb>(samples::get_mdb());
    pinned.check("MdbServer.", expect_file!["golden/mdb.txt"]);
}

#[test]
fn methods_of_the_file_generator_have_these_bytes() {
    let mut pinned = Pinned::default();
    pinned.method::<file_generator::Generate>(samples::generate());
    pinned.method::<file_generator::GetContents>(samples::get_contents());
    pinned.method::<file_generator::GetSecrets>(samples::get_secrets());
    pinned.method::<file_generator::GetGenerators>(samples::get_generators());
    pinned.method::<file_generator::OrderRevision>(samples::order_revision());
    pinned.method::<file_generator::SignContents>(samples::sign_contents());
    pinned.method::<file_generator::Load>(samples::load_configuration());
    pinned.method::<file_generator::RenewCertificates>(samples::renew_certificates());
    pinned.check("FileGenerator.", expect_file!["golden/file_generator.txt"]);
}

#[test]
fn an_image_with_signers_has_these_bytes() {
    let mut text = String::new();
    both(&mut text, "content", &samples::signed_content());
    writeln!(text, "digest: {}", samples::signed_content().digest()).unwrap();
    expect_file!["golden/image_2.txt"].assert_eq(&text);
}

#[test]
fn every_service_is_pinned() {
    let services =
        ["Subd.", "ImageServer.", "ObjectServer.", "Dominator.", "MdbServer.", "FileGenerator."];
    for method in api::methods() {
        let pinned = services.iter().any(|service| method.name.starts_with(service));
        assert!(method.reserved || pinned, "{}", method.name);
    }
}

#[test]
fn faults_have_these_bytes() {
    let mut text = String::new();
    for code in FaultCode::ALL {
        let fault = Fault::new(code, "why");
        let json = serde_json::to_value(code).unwrap();
        assert_eq!(json.as_str(), Some(code.name()));
        writeln!(text, "== {} {}", code.status(), code.name()).unwrap();
        both(&mut text, "fault", &fault);
    }
    expect_file!["golden/faults.txt"].assert_eq(&text);
}

#[test]
fn object_streams_have_these_bytes() {
    let mut text = String::new();
    for algorithm in [Algorithm::Blake3, Algorithm::Sha512] {
        let id = algorithm.digest(b"content");
        for head in [ObjectHead::Object { id, size_bytes: 7 }, ObjectHead::Absent(id)] {
            writeln!(text, "== {algorithm} {}", kind(&head)).unwrap();
            text.push_str(&hex(&head_bytes(&head)));
        }
        let mut packed = Vec::new();
        ObjectHead::Object { id, size_bytes: 7 }.encode_as(ContentForm::Packed, &mut packed);
        packing::append(&mut packed, b"content", None);
        writeln!(text, "== {algorithm} packed object, a chunk as it is").unwrap();
        text.push_str(&hex(&packed));
    }
    writeln!(text, "== end\n{}", hex(&head_bytes(&ObjectHead::End)).trim_end()).unwrap();
    expect_file!["golden/object_stream.txt"].assert_eq(&text);
}

fn kind(head: &impl Debug) -> String {
    let text = format!("{head:?}");
    text.split([' ', '(']).next().unwrap().to_lowercase()
}

#[test]
fn trees_have_these_bytes() {
    let mut out = String::new();
    for algorithm in [Algorithm::Blake3, Algorithm::Sha512] {
        let tree = samples::tree(algorithm);
        writeln!(out, "== {algorithm}").unwrap();
        out.push_str(&text::to_text(&tree));
        dump(&mut out, "/", tree.root());
        out.push('\n');
    }
    expect_file!["golden/trees.txt"].assert_eq(&out);
}

fn dump(out: &mut String, path: &str, directory: &Directory) {
    writeln!(out, "{path} {}:\n{}", directory.digest(), hex(&directory.encode()).trim_end())
        .unwrap();
    for entry in directory.entries() {
        if let Child::Directory(below) = &entry.child {
            dump(out, &format!("{path}{}/", entry.name), below);
        }
    }
}
