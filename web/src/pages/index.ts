import { ComponentType } from 'preact'
import type { PageProps } from '../router'
import { Audit } from './audit'
import { Fleet } from './fleet'
import { ImportPage } from './import'
import { Hosts } from './hosts'
import { Agents } from './machines'
import { Notifications } from './notifications'
import { Policies } from './policies'
import { Preview } from './preview'
import { SavingsPage } from './savings'
import { Schedules } from './schedules'
import { SettingsPage } from './settings'
import { Templates } from './templates'
import { Tokens } from './tokens'
import { WorkerPage } from './worker'

/** A page of the dashboard. One without a title is reached by links only, from the page that it is of. */
export interface Page { path: string; title?: string; of?: string; admin?: boolean; show: ComponentType<PageProps> }

export const pages: Page[] = [
  { path: '', title: 'Fleet', show: Fleet },
  { path: 'workers', of: '', show: WorkerPage },
  { path: 'import', of: '', show: ImportPage },
  { path: 'templates', title: 'Templates', show: Templates },
  { path: 'savings', title: 'Savings', show: SavingsPage },
  { path: 'hosts', title: 'Hosts', show: Hosts },
  { path: 'agents', title: 'Agents', show: Agents },
  { path: 'policies', title: 'Policies', show: Policies },
  { path: 'preview', of: 'policies', show: Preview },
  { path: 'schedules', title: 'Schedules', show: Schedules },
  { path: 'notifications', title: 'Notifications', show: Notifications },
  { path: 'audit', title: 'Audit log', show: Audit },
  { path: 'settings', title: 'Settings', show: SettingsPage },
  { path: 'tokens', title: 'Tokens', admin: true, show: Tokens },
]
