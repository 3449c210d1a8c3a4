// Discovery results, and the steps to armed workers.

import { useState } from 'preact/hooks'
import { Discovered, Scan, ScannedRegion } from '../api'
import { useResource } from '../resource'
import { ConnectRegion, CreateWorker, ImportWorkers } from './launch'
import { Card, Fault, Loading, Time } from './ui'

interface Found { items: Discovered[]; scan?: Scan }

/** Why a scan does not list an instance, by Skip code of the API. */
const skips: Record<string, string> = {
  worker: 'already workers',
  no_match: 'without the tag or a matching image name',
  launching: 'just launched by lull',
  imported: 'imported by this scan',
  unread: 'skipped because the store could not be read',
}

/**
 * Guides to the first worker: the scanned regions, the instances that were found,
 * and arming. onImported runs after an import.
 */
export function Discovery(p: { admin: boolean; first: boolean; onImported?: () => void }) {
  const r = useResource<Found>('/workers/discovered', { every: 5_000 })
  const [open, setOpen] = useState<'region' | 'import' | 'create' | ''>('')
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set())
  if (!r.value) return r.problem ? <Fault problem={r.problem} retry={r.reload} /> : <Loading what="the last scan" />
  const { items, scan } = r.value
  const failed = scan?.regions.some((x) => x.error) ?? false
  const state = !scan ? 'never' : scan.discovery_import === 'off' ? 'off' : items.length > 0 ? 'found' : failed ? 'failed' : 'none'
  const picked = items.filter((d) => chosen.has(d.ec2_instance_id))
  const close = () => { setOpen(''); setChosen(new Set()); r.reload() }
  return (
    <div class="guide" data-testid="discovery" data-state={state}>
      {p.first && <p class="welcome"><strong>No workers yet.</strong> Connect your machines in three steps.</p>}
      {r.problem && <Fault problem={r.problem} retry={r.reload} what="This is not up to date." />}
      <Card title="1. Connect a region" aside={p.admin && <button type="button" data-step="regions" onClick={() => setOpen('region')}>Connect a region</button>}>
        {!scan && <p>No discovery scan has finished yet. The first one runs within seconds of the server's start.</p>}
        {state === 'off' && <p>Discovery is off. Connect a region to turn it on.</p>}
        {scan && state !== 'off' && (
          <>
            <Regions regions={scan.regions} />
            <p class="muted small">Last scan <Time at={scan.at} />, next <Time at={scan.next_at} as="clock" />. It lists instances with the tag <code data-testid="scan-tag">{scan.tag}</code> or a matching image name.</p>
          </>
        )}
        {failed && <p data-step="access">A region could not be scanned. Check the server's AWS credentials and permissions: <code>lull server doctor</code></p>}
        {scan && state === 'none' && <p data-step="patterns">To match other images, change <a href="/settings?q=discovery_ami_name_patterns">discovery_ami_name_patterns</a>.</p>}
      </Card>
      <Card title={items.length === 0 ? '2. Import instances' : `2. Import ${items.length.toLocaleString('en')} discovered instance${items.length === 1 ? '' : 's'}`} class="flush" aside={p.admin && <span class="asides"><button type="button" data-step="import" onClick={() => { setChosen(new Set()); setOpen('import') }}>Import by instance ID</button>{items.length > 0 && <button type="button" class="primary" aria-disabled={picked.length === 0} onClick={() => picked.length > 0 && setOpen('import')}>{`Import ${picked.length || ''} selected`.replace('  ', ' ')}</button>}</span>}>
        {items.length === 0 ? <p class="muted">{state === 'found' ? '' : 'No new instances found.'}</p> : <Machines items={items} chosen={chosen} set={setChosen} admin={p.admin} />}
      </Card>
      <Card title="3. Arm workers">
        <p>Imported workers start in dry-run mode: lull records its decisions but pauses nothing. Review them for a day, then arm workers one by one or all at once.</p>
      </Card>
      <p data-step="create">{p.admin ? <>Or launch new workers: <button type="button" onClick={() => setOpen('create')}>Create a worker</button> <a class="button" href="/templates">Templates</a></> : 'Only admins can connect regions, import instances and arm workers.'}</p>
      {open === 'region' && <ConnectRegion onClose={close} />}
      {open === 'create' && <CreateWorker onClose={close} />}
      {open === 'import' && <ImportWorkers found={picked} onClose={(n) => { close(); if (n > 0) p.onImported?.() }} />}
    </div>
  )
}

function Regions(p: { regions: ScannedRegion[] }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Scanned regions">
      <table>
        <thead><tr><th scope="col">Region</th><th scope="col">Image names</th><th scope="col">Image owners</th><th scope="col">Instances</th><th scope="col">Found</th><th scope="col">Skipped</th></tr></thead>
        <tbody>
          {p.regions.map((x) => (
            <tr key={`${x.aws_region}/${x.account ?? ''}`} data-testid="scanned-region" data-region={x.aws_region} data-error={x.error ? 'true' : undefined}>
              <th scope="row">{x.aws_region}{x.account && <> <span class="muted small">{x.account}</span></>}</th>
              <td data-field="patterns">{x.ami_name_patterns.join(', ') || '–'}</td>
              <td data-field="owners">{x.image_owners.join(', ') || '–'}</td>
              {x.error ? <td colSpan={3} data-field="error">Not scanned: {x.error}</td> : (
                <>
                  <td data-field="instances">{x.instances.toLocaleString('en')}</td>
                  <td data-field="found">{x.found.toLocaleString('en')}</td>
                  <td>{Object.entries(x.skipped).filter(([, n]) => n > 0).map(([code, n]) => <div key={code} data-skip={code} data-count={n}>{n.toLocaleString('en')} {skips[code] ?? code}</div>)}</td>
                </>
              )}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}

/** Maximum number of listed instances. */
const shown = 200

function Machines(p: { items: Discovered[]; chosen: ReadonlySet<string>; set: (s: ReadonlySet<string>) => void; admin: boolean }) {
  const list = p.items.slice(0, shown)
  const all = list.every((d) => p.chosen.has(d.ec2_instance_id))
  const toggle = (id: string) => {
    const next = new Set(p.chosen)
    if (!next.delete(id)) next.add(id)
    p.set(next)
  }
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Discovered instances">
      <table>
        <thead><tr>{p.admin && <th scope="col" class="pickcell"><input type="checkbox" aria-label="Select all" checked={all} onChange={() => p.set(new Set(all ? [] : list.map((d) => d.ec2_instance_id)))} /></th>}<th scope="col">Instance</th><th scope="col">Region</th><th scope="col">State</th><th scope="col">Found by</th></tr></thead>
        <tbody>
          {list.map((d) => (
            <tr key={`${d.aws_region}/${d.ec2_instance_id}`} data-testid="discovered-instance" data-instance={d.ec2_instance_id}>
              {p.admin && <td class="pickcell"><input type="checkbox" aria-label={`Select ${d.name || d.ec2_instance_id}`} checked={p.chosen.has(d.ec2_instance_id)} onChange={() => toggle(d.ec2_instance_id)} /></td>}
              <th scope="row">{d.name || d.ec2_instance_id}{d.name && <> <span class="muted small">{d.ec2_instance_id}</span></>}</th>
              <td>{d.aws_region}{d.account && <> <span class="muted small">{d.account}</span></>}</td>
              <td>{d.state}</td>
              <td>{d.orphan ? 'tag' : 'image name'}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {p.items.length > shown && <p class="muted small">Showing the first {shown}. Import these to see more.</p>}
    </div>
  )
}
