// What discovery scanned, for a fleet without workers.

import { Discovered, Scan, ScannedRegion } from '../api'
import { useResource } from '../resource'
import { Card, Fault, Loading, Time } from './ui'

interface Discovery { items: Discovered[]; scan?: Scan }

/** Why a scan does not list an instance, by Skip code of the API. */
const skips: Record<string, string> = {
  worker: 'already workers',
  no_match: 'without the tag or a matching image name',
  launching: 'just launched by lull',
  imported: 'imported by this scan',
  unread: 'skipped because the store could not be read',
}

/** Reports the last scan, what it found, and the next step. */
export function DiscoveryStatus() {
  const r = useResource<Discovery>('/workers/discovered', { every: 5_000 })
  if (!r.value) return r.problem ? <Fault problem={r.problem} retry={r.reload} /> : <Loading what="the last scan" />
  const { items, scan } = r.value
  const failed = scan?.regions.some((x) => x.error) ?? false
  const state = !scan ? 'never' : scan.discovery_import === 'off' ? 'off' : items.length > 0 ? 'found' : failed ? 'failed' : 'none'
  return (
    <Card title="There are no workers yet.">
      <div data-testid="discovery" data-state={state}>
        {r.problem && <Fault problem={r.problem} retry={r.reload} what="This is not up to date." />}
        {!scan && <p>No discovery scan has finished yet. The first one runs within seconds of the server's start.</p>}
        {state === 'off' && <p>Discovery is off. Switch it on with <code>lull settings set discovery_import=confirm</code>, or under <a href="/settings">Settings</a>.</p>}
        {scan && state !== 'off' && (
          <>
            <p>Last scan <Time at={scan.at} />, next <Time at={scan.next_at} as="clock" />. It lists instances with the tag <code data-testid="scan-tag">{scan.tag}</code> or a matching image name.</p>
            <Regions regions={scan.regions} />
          </>
        )}
        {items.length > 0 && <Found items={items} />}
        <h3>Next steps</h3>
        <ul data-testid="next-steps">
          {failed && <li data-step="access">Check AWS credentials and permissions: <code>lull server doctor</code></li>}
          {items.length === 0 && <li data-step="import">Import any instance: <code>lull worker import INSTANCE-ID --region REGION</code></li>}
          {scan && state === 'none' && <li data-step="patterns">Match other images: <code>lull settings set 'discovery_ami_name_patterns=*cml*,*NAME*'</code></li>}
          {scan && state !== 'off' && <li data-step="regions">Scan other regions: <code>lull settings set discovery_regions=us-east-1,eu-north-1</code></li>}
          <li data-step="create">Launch a worker: <code>lull worker create</code></li>
        </ul>
      </div>
    </Card>
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

/** How many instances are listed; the CLI lists all. */
const shown = 50

function Found(p: { items: Discovered[] }) {
  return (
    <>
      <h3>{p.items.length.toLocaleString('en')} instance{p.items.length === 1 ? '' : 's'} can be imported</h3>
      <div class="scroll" tabIndex={0} role="region" aria-label="Instances that can be imported">
        <table>
          <thead><tr><th scope="col">Instance</th><th scope="col">Region</th><th scope="col">State</th><th scope="col">Found by</th><th scope="col">Import with</th></tr></thead>
          <tbody>
            {p.items.slice(0, shown).map((d) => (
              <tr key={`${d.aws_region}/${d.ec2_instance_id}`} data-testid="discovered-instance" data-instance={d.ec2_instance_id}>
                <th scope="row">{d.name || d.ec2_instance_id}{d.name && <> <span class="muted small">{d.ec2_instance_id}</span></>}</th>
                <td>{d.aws_region}{d.account && <> <span class="muted small">{d.account}</span></>}</td>
                <td>{d.state}</td>
                <td>{d.orphan ? 'tag' : 'image name'}</td>
                <td><code>{`lull worker import ${d.ec2_instance_id} --region ${d.aws_region}${d.account ? ` --account ${d.account}` : ''}`}</code></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {p.items.length > shown && <p class="muted small">The first {shown} are shown. List all with <code>lull worker discovered</code>.</p>}
      <p class="muted small">An imported worker stays in dry-run mode until it is armed.</p>
    </>
  )
}
