//! `docs/PROTOCOL.md` says what the code does.

use api::{dominator, file_generator, image_server, mdb, object_server, subd};
use api::{fault::FaultCode, method::Method};

fn document() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/PROTOCOL.md");
    std::fs::read_to_string(path).unwrap()
}

fn size(bytes: usize) -> String {
    format!("{} MiB", bytes >> 20)
}

fn row<M: Method>() -> String {
    let (request, reply) = (size(M::REQUEST_BYTES_MAX), size(M::REPLY_BYTES_MAX));
    format!("| `{}` | {} | {request} | {reply} |", M::NAME, M::ACCESS.describe())
}

#[test]
fn every_method_is_in_the_table_with_its_access_and_limits() {
    let rows = [
        row::<subd::Poll>(),
        row::<subd::GetDirectories>(),
        row::<subd::Fetch>(),
        row::<subd::Prepare>(),
        row::<subd::Commit>(),
        row::<subd::Cleanup>(),
        row::<subd::GetConfiguration>(),
        row::<subd::SetConfiguration>(),
        row::<subd::ScanNow>(),
        row::<subd::Pause>(),
        row::<subd::Resume>(),
        row::<subd::GetFiles>(),
        row::<subd::CheckHealth>(),
        row::<image_server::AddImage>(),
        row::<image_server::GetImage>(),
        row::<image_server::ListImages>(),
        row::<image_server::DeleteImage>(),
        row::<image_server::collection::Collect>(),
        row::<image_server::notes::CopyImage>(),
        row::<image_server::notes::ChangeTags>(),
        row::<image_server::notes::FindLatestImage>(),
        row::<image_server::expiry::ChangeExpiry>(),
        row::<image_server::expiry::AcceptClock>(),
        row::<image_server::directories::MakeDirectory>(),
        row::<image_server::directories::RemoveDirectory>(),
        row::<image_server::directories::ChangeOwner>(),
        row::<image_server::directories::ListDirectories>(),
        row::<image_server::private::ChangeReaders>(),
        row::<image_server::private::GetPrivateDirectories>(),
        row::<image_server::collection::EstimateImage>(),
        row::<image_server::expiry::HoldImages>(),
        row::<image_server::replication::GetImageUpdates>(),
        row::<image_server::replication::directories::GetMadeDirectories>(),
        row::<image_server::replication::Forward>(),
        row::<image_server::replication::GetReplication>(),
        row::<image_server::replication::DropCopy>(),
        row::<object_server::CheckObjects>(),
        row::<dominator::ListSubs>(),
        row::<dominator::ShowSub>(),
        row::<dominator::GetStatus>(),
        row::<dominator::DisableUpdates>(),
        row::<dominator::EnableUpdates>(),
        row::<dominator::ClearSafetyShutoff>(),
        row::<dominator::Retry>(),
        row::<dominator::orders::Trust>(),
        row::<dominator::orders::AcceptImage>(),
        row::<dominator::orders::ResumeImage>(),
        row::<dominator::content::ListContentChanges>(),
        row::<dominator::content::OrderContentChange>(),
        row::<dominator::mdb::ShowMdb>(),
        row::<dominator::mdb::AcceptMdb>(),
        row::<dominator::events::ListEvents>(),
        row::<dominator::events::AcceptClock>(),
        row::<dominator::events::Backup>(),
        row::<dominator::explain::Explain>(),
        row::<dominator::orders::PauseUpdates>(),
        row::<dominator::orders::ResumeUpdates>(),
        row::<dominator::rollback::RollBack>(),
        row::<dominator::rollback::EndRollback>(),
        row::<dominator::rollback::ListLastingOrders>(),
        row::<dominator::orders::ForceDisruptiveUpdate>(),
        row::<dominator::orders::GoOn>(),
        row::<dominator::permits::FenceMachine>(),
        row::<dominator::permits::ListPermits>(),
        row::<dominator::departing::ListDeparting>(),
        row::<dominator::departing::OrderDeparting>(),
        row::<dominator::orders::FastUpdate>(),
        row::<dominator::orders::WatchSub>(),
        row::<dominator::orders::SetDefaultImage>(),
        row::<dominator::plan::PlanMachine>(),
        row::<dominator::plan::PlanMachines>(),
        row::<dominator::plan::CheckMdb>(),
        row::<dominator::kept_files::CountKeptFiles>(),
        row::<dominator::resources::GetResources>(),
        row::<dominator::resources::PlanResources>(),
        row::<dominator::resources::OrderResource>(),
        row::<dominator::rollouts::EditEnvironments>(),
        row::<dominator::rollouts::OrderEnvironment>(),
        row::<dominator::rollouts::ListEnvironments>(),
        row::<dominator::rollouts::PlanRollout>(),
        row::<dominator::rollouts::StartRollout>(),
        row::<dominator::rollouts::OrderRollout>(),
        row::<dominator::rollouts::VoteOnStep>(),
        row::<dominator::rollouts::ListRollouts>(),
        row::<dominator::settings::SetSubConfiguration>(),
        row::<dominator::settings::GetSubConfiguration>(),
        row::<mdb::GetMdb>(),
        row::<file_generator::Generate>(),
        row::<file_generator::GetContents>(),
        row::<file_generator::GetSecrets>(),
        row::<file_generator::GetGenerators>(),
        row::<file_generator::OrderRevision>(),
        row::<file_generator::SignContents>(),
        row::<file_generator::Load>(),
        row::<file_generator::RenewCertificates>(),
        row::<subd::AddObjects>(),
        row::<subd::ReplaceCertificate>(),
        row::<subd::OfferImage>(),
        row::<subd::OfferContents>(),
        row::<subd::ForgetIssued>(),
        row::<subd::GetRefusedChanges>(),
        row::<dominator::tasks::ListTasks>(),
        row::<dominator::tasks::GetTask>(),
        row::<dominator::tasks::OrderTasks>(),
        row::<dominator::tasks::GetTaskLog>(),
        row::<subd::GetTasks>(),
        row::<subd::GetTaskStates>(),
        row::<subd::OrderTask>(),
        row::<subd::PermitTask>(),
        row::<subd::GetTaskLog>(),
        row::<subd::Provision>(),
        row::<subd::ContinueProvisioning>(),
        row::<subd::GiveUpProvisioning>(),
        row::<subd::PlanResources>(),
        row::<subd::GetResources>(),
        row::<subd::OrderResource>(),
        row::<subd::GetFleetResources>(),
        row::<subd::TellFleetResources>(),
        row::<subd::GetDirectoryBlocks>(),
        row::<subd::HoldMachine>(),
        row::<subd::TakeOver>(),
        row::<subd::RetryTriggers>(),
        row::<subd::PreviewScan>(),
        row::<subd::CountOwners>(),
        row::<subd::GetLimits>(),
        row::<subd::Hurry>(),
        row::<dominator::settings::GetSubLimits>(),
        row::<image_server::notes::ChangeSignatures>(),
    ];
    let document = document();
    let (_, table) = document.split_once("\n## Methods\n").unwrap();
    let table: Vec<&str> = table.lines().take_while(|line| !line.starts_with("## ")).collect();
    let has = |row: &String| table.iter().any(|line| line.starts_with(row));
    for method in api::methods() {
        let name = format!("| `{}` | {} |", method.name, method.access.describe());
        assert!(has(&name), "PROTOCOL.md lacks the row {name}");
        let streams = ["ObjectServer.AddObjects", "ObjectServer.GetObjects"];
        let pinned = rows.iter().any(|row| row.contains(&name));
        assert!(method.reserved || streams.contains(&method.name) || pinned, "{}", method.name);
    }
    for row in rows {
        assert!(has(&row), "PROTOCOL.md lacks the row {row}");
    }
}

#[test]
fn every_fault_is_in_the_document_with_its_status() {
    let document = document();
    for code in FaultCode::ALL {
        let row = format!("| `{}` | {} |", code.name(), code.status());
        assert!(document.contains(&row), "PROTOCOL.md lacks the row {row}");
    }
}
